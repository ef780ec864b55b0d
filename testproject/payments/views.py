"""The same operation, protected in each of the ways there are, and once not at all."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from django.http import HttpRequest, JsonResponse
from django.http.response import HttpResponseBase
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST, require_safe
from rest_framework import generics, permissions, viewsets
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotency_exempt, idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import PAYMENT

from .auth import token_required
from .effects import perform
from .models import Effect, Kind
from .serializers import EffectSerializer

# Django REST framework


class ChargeViewSet(IdempotentViewMixin, viewsets.GenericViewSet):
    """A viewset with the mixin; who forgets the key is refused."""

    idempotency_policy = PAYMENT
    queryset = Effect.objects.filter(kind=Kind.CHARGE)
    serializer_class = EffectSerializer
    # A replay is for those only who may charge at the moment they ask for it.
    permission_classes = [permissions.DjangoModelPermissions]

    def create(self, request: Request) -> Response:
        receipt = perform(request, Kind.CHARGE, request.data)
        return Response(receipt.body, receipt.status, headers=receipt.headers)


class EffectView(APIView):
    """What the views below have in common."""

    kind: ClassVar[Kind]

    def post(self, request: Request) -> Response:
        receipt = perform(request, self.kind, request.data)
        return Response(receipt.body, receipt.status, headers=receipt.headers)


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


# Django without DRF. No cookie is looked at, so there is nothing for CSRF to forge.


@csrf_exempt
@require_POST
@token_required
def plain_order(request: HttpRequest) -> HttpResponseBase:
    """A function that knows nothing of idempotency: the middleware protects it."""
    return _answer(request, Kind.PLAIN)


@csrf_exempt
@require_POST
@token_required
@idempotent
def decorated_order(request: HttpRequest) -> HttpResponseBase:
    """A function with the decorator, below the check of who is calling."""
    return _answer(request, Kind.DECORATED)


def _answer(request: HttpRequest, kind: Kind) -> JsonResponse:
    try:
        receipt = perform(request, kind, json.loads(request.body))
    except ValueError:
        return JsonResponse({"detail": "The body is not JSON."}, status=400)
    except ValidationError as error:
        return JsonResponse(error.detail, status=400, safe=False)
    return JsonResponse(receipt.body, status=receipt.status, headers=receipt.headers)


# What was done


@require_safe
def count_effects(request: HttpRequest) -> JsonResponse:
    """How many effects there are with a reference, of whatever kind: ``?reference=…``."""
    counted = Effect.objects.filter(reference=request.GET.get("reference", ""))
    return JsonResponse({"count": counted.count()})


class EffectDetail(generics.RetrieveAPIView):
    """Where ``Location`` leads: one effect, for its owner."""

    serializer_class = EffectSerializer

    def get_queryset(self) -> Any:
        return Effect.objects.filter(owner=self.request.user)
