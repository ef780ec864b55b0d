"""The same operation, protected in each of the ways there are, and once not at all."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from typing import Any, ClassVar

from asgiref.sync import sync_to_async
from django.core.exceptions import BadRequest
from django.http import HttpRequest, JsonResponse
from django.http.response import HttpResponseBase
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST, require_safe
from rest_framework import generics, permissions, viewsets
from rest_framework.authentication import TokenAuthentication
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotency_exempt, idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import PAYMENT, Policy

from .auth import token_required
from .effects import Receipt, make, perform, understood
from .faults import Faults
from .models import Effect, Kind, Posting, Side
from .serializers import EffectSerializer
from .transfers import transfer

# Django REST framework


class ChargeViewSet(IdempotentViewMixin, viewsets.GenericViewSet):
    """A viewset with the mixin; who forgets the key is refused."""

    idempotency_policy = Policy(required=True, ttl=timedelta(days=30))
    queryset = Effect.objects.filter(kind=Kind.CHARGE)
    serializer_class = EffectSerializer
    # A replay is for those only who may charge at the moment they ask for it.
    permission_classes = [permissions.DjangoModelPermissions]

    def create(self, request: Request) -> Response:
        return _response(request, perform(request, Kind.CHARGE, request.data))


class EffectView(APIView):
    """The base of the views below."""

    kind: ClassVar[Kind]

    def post(self, request: Request) -> Response:
        return _response(request, perform(request, self.kind, request.data))


class Bearer(TokenAuthentication):
    """The API's tokens, as Stripe's clients send them."""

    keyword = "Bearer"


class StripeChargeView(IdempotentViewMixin, EffectView):
    """A view for Stripe's own clients, which understand the errors of ``DIALECT=stripe``."""

    kind = Kind.CHARGE
    authentication_classes = [Bearer, TokenAuthentication]


class OrderView(IdempotentViewMixin, EffectView):
    """A view with the mixin; the key is the client's choice."""

    kind = Kind.ORDER


class ViaMiddlewareView(EffectView):
    """A view that knows nothing of idempotency: the middleware protects it."""

    kind = Kind.VIA_MIDDLEWARE


@idempotency_exempt
class UnprotectedView(EffectView):
    """A view without protection, to see what that is like."""

    kind = Kind.UNPROTECTED


# Effects that no transaction spans: the claim is committed first, and each step is stored.


class TransferView(IdempotentViewMixin, APIView):
    """Three steps, including a call to an external service; a retry resumes them."""

    idempotency_policy = PAYMENT.replace(store="database")

    def post(self, request: Request) -> Response:
        return _response(request, transfer(request, request.data))


class PayoutView(IdempotentViewMixin, APIView):
    """Long work: a retry in the meantime gets 202 and the URL of the status."""

    idempotency_policy = Policy(
        store="database", mode="leased", on_conflict="accepted", required=True
    )

    def post(self, request: Request) -> Response:
        asked = understood(request.data)
        Faults(request).sleep()
        receipt = request.idempotency.step("payout", make, request, Kind.PAYOUT, asked)
        return _response(request, receipt)


def _response(request: Request, receipt: Receipt) -> Response:
    return Response(receipt["body"], Faults(request).status(201), headers=receipt["headers"])


# Django without DRF. No cookie is looked at, so there is nothing for CSRF to forge.


@method_decorator([csrf_exempt, token_required], name="dispatch")
class PlainOrderView(View):
    """A view that knows nothing of idempotency: the middleware protects it."""

    def post(self, request: HttpRequest) -> HttpResponseBase:
        return _respond(request, Kind.PLAIN)


@csrf_exempt
@require_POST
@token_required
@idempotent
def decorated_order(request: HttpRequest) -> HttpResponseBase:
    """A function with the decorator, below the check of who is calling."""
    return _respond(request, Kind.DECORATED)


def _respond(request: HttpRequest, kind: Kind) -> JsonResponse:
    try:
        receipt = perform(request, kind, json.loads(request.body))
    except (ValueError, ValidationError) as error:
        return _refusal(error)
    return _json_response(request, receipt)


@csrf_exempt
@require_POST
@token_required
@idempotent(store="database")
async def async_order(request: HttpRequest) -> HttpResponseBase:
    """An async function with the decorator. No transaction can span it: its effect is a step."""
    try:
        asked = understood(json.loads(request.body))
    except (ValueError, ValidationError) as error:
        return _refusal(error)
    await Faults(request).asleep()
    if not request.idempotency:  # the client sent no key
        receipt = await sync_to_async(make)(request, Kind.ASYNC, asked)
    else:
        receipt = await request.idempotency.astep("order", make, request, Kind.ASYNC, asked)
    return _json_response(request, receipt)


def _json_response(request: HttpRequest, receipt: Receipt) -> JsonResponse:
    status = Faults(request).status(201)
    return JsonResponse(receipt["body"], status=status, headers=receipt["headers"])


def _refusal(error: ValueError | ValidationError) -> JsonResponse:
    if isinstance(error, ValidationError):
        return JsonResponse(error.detail, status=400, safe=False)
    return JsonResponse({"detail": "The body is not JSON."}, status=400)


# What was done


def _reference(request: HttpRequest) -> str:
    reference = request.GET.get("reference", "")
    if "\0" in reference:  # which PostgreSQL takes for an error
        raise BadRequest("A reference holds no NUL character.")
    return reference


@require_safe
def count_effects(request: HttpRequest) -> JsonResponse:
    """Count the effects with a reference: ``?reference=…``, and of a kind: ``&kind=…``."""
    counted = Effect.objects.filter(reference=_reference(request))
    if kind := request.GET.get("kind"):
        if kind not in Kind.values:
            raise BadRequest(f"No effect is of the kind {kind!r}: {', '.join(Kind.values)}.")
        counted = counted.filter(kind=kind)
    kinds = Counter(counted.values_list("kind", flat=True))
    return JsonResponse({"count": kinds.total(), "kinds": dict(kinds)})


@require_safe
def count_postings(request: HttpRequest) -> JsonResponse:
    """Count the debits and credits with a reference: ``?reference=…``."""
    posted = Posting.objects.filter(reference=_reference(request))
    return JsonResponse({side: posted.filter(side=side).count() for side in Side.values})


class EffectDetail(generics.RetrieveAPIView):
    """One effect, for its owner; the target of ``Location``."""

    serializer_class = EffectSerializer

    def get_queryset(self) -> Any:
        return Effect.objects.filter(owner=self.request.user)
