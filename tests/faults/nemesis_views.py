"""What clients ask for while a nemesis is about: the bank's operations, and some worse ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from django.db import connection
from django.http import HttpRequest, JsonResponse
from django.urls import include, path

from idempotency_django.decorators import idempotent

from .bank.views import enter, fail_if_asked, make, reference_of


@idempotent(mode="leased")
def outside(request: HttpRequest) -> JsonResponse:
    """The effect is at the ledger, which honours a derived key; for stores without steps."""
    execution = request.idempotency  # type: ignore[attr-defined]
    entry = enter(execution.derive_key("entry"), reference_of(request))
    fail_if_asked(request)
    return JsonResponse({"entry": entry}, status=201)


def stubborn(view: Callable[[HttpRequest], JsonResponse]) -> Callable[[HttpRequest], JsonResponse]:
    """A retry loop around a protected view, as projects have one for deadlocks."""

    def loop(request: HttpRequest) -> JsonResponse:
        try:
            return view(request)
        except LookupError:
            return view(request)

    return loop


@stubborn
@idempotent(mode="transactional")
def looped(request: HttpRequest) -> JsonResponse:
    """One that is to fail does so in its first run, and the loop runs it again."""
    reference = reference_of(request)
    charge = make(reference, "charge")
    entry = enter(request.idempotency.derive_key("entry"), reference)  # type: ignore[attr-defined]
    if not hasattr(request, "was_run"):
        request.was_run = True  # type: ignore[attr-defined]
        fail_if_asked(request)
    return JsonResponse({"charge": charge, "entry": entry}, status=201)


@idempotent
def committing(request: HttpRequest) -> JsonResponse:
    """The driver is given a COMMIT: from there on the claim is in progress for all to see."""
    with closing(connection.connection.cursor()) as cursor:
        cursor.execute("COMMIT")
    reference = reference_of(request)
    charge = make(reference, "charge")
    entry = enter(request.idempotency.derive_key("entry"), reference)  # type: ignore[attr-defined]
    fail_if_asked(request)
    return JsonResponse({"charge": charge, "entry": entry}, status=201)


urlpatterns = [
    path("committing/", committing),
    path("looped/", looped),
    path("outside/", outside),
    path("", include("tests.faults.bank.views")),
]
