"""The operations, each in the mode that it is named after.

All of them do something in the database and something at the ledger, and respond with both.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request as HttpCall
from urllib.request import urlopen

from django.conf import settings
from django.http import HttpRequest, JsonResponse
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.testing import PATIENCE
from tests.faults.boundaries import boundaries

from .models import Effect, Standing


def reference_of(request: HttpRequest) -> str:
    return str(json.loads(request.body)["reference"])


def make(reference: str, kind: str) -> int:
    """Do something in the database, once more for each call."""
    return int(Effect.objects.create(reference=reference, kind=kind).pk)


def enter(key: str, reference: str) -> int:
    """Do something at the ledger, once for each key; the number of the booking."""
    body, headers = json.dumps({"reference": reference}).encode(), {"Idempotency-Key": key}
    call = HttpCall(f"{settings.LEDGER_URL}/bookings", body, headers)
    with urlopen(call, timeout=PATIENCE) as response:
        return int(json.load(response)["booking"])


def fail_if_asked(request: Any) -> None:
    if request.headers["X-Fail"] == "True":
        raise LookupError("as asked")


@idempotent(mode="transactional")
def transactional(request: HttpRequest) -> JsonResponse:
    """The effect is in the transaction that the claim and the response are in."""
    reference = reference_of(request)
    charge = make(reference, "charge")
    entry = enter(request.idempotency.derive_key("entry"), reference)
    fail_if_asked(request)
    return JsonResponse({"charge": charge, "entry": entry}, status=201)


class TransactionalView(IdempotentViewMixin, APIView):
    """The same with DRF."""

    def post(self, request: Request) -> Response:
        reference = request.data["reference"]
        charge = make(reference, "charge")
        entry = enter(request.idempotency.derive_key("entry"), reference)
        fail_if_asked(request)
        return Response({"charge": charge, "entry": entry}, status=201)


@idempotent(mode="leased")
def leased(request: HttpRequest) -> JsonResponse:
    """The effect is in a step; what ``atomic()`` alone protects may be done again."""
    reference, execution = reference_of(request), request.idempotency
    charge = execution.step("charge", make, reference, "charge")
    entry = enter(execution.derive_key("entry"), reference)
    with execution.atomic():
        Standing.objects.update_or_create(reference=reference, defaults={"paid": True})
    fail_if_asked(request)
    return JsonResponse({"charge": charge, "entry": entry}, status=201)


@idempotent(mode="leased")
def stepped(request: HttpRequest) -> JsonResponse:
    """Debit, a call to the ledger, credit."""
    return JsonResponse(_transfer(request), status=201)


@idempotent(mode="leased")
def outside(request: HttpRequest) -> JsonResponse:
    """The effect is at the ledger, which honours a derived key; for stores without steps."""
    entry = enter(request.idempotency.derive_key("entry"), reference_of(request))
    fail_if_asked(request)
    return JsonResponse({"entry": entry}, status=201)


@idempotent(mode="leased")
def renewed(request: HttpRequest) -> JsonResponse:
    """The same, taking so long that the lease is renewed meanwhile."""
    boundaries.wait_for_renewal(PATIENCE)
    return JsonResponse(_transfer(request), status=201)


def _transfer(request: Any) -> dict[str, int]:
    reference, execution = reference_of(request), request.idempotency

    def credit() -> int:
        made = make(reference, "credit")
        fail_if_asked(request)
        return made

    return {
        "debit": execution.step("debit", make, reference, "debit"),
        "entry": execution.step("entry", enter, execution.derive_key("entry"), reference),
        "credit": execution.step("credit", credit),
    }


urlpatterns = [
    path("transactional/", transactional),
    path("drf/", TransactionalView.as_view()),
    path("leased/", leased),
    path("stepped/", stepped),
    path("outside/", outside),
    path("renewed/", renewed),
]
