"""Code of a user's, as ``make types`` checks it; nothing of it runs but its import."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, assert_type

from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.views.generic import View
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import BaseSerializer
from rest_framework.viewsets import ModelViewSet

from idempotency_django import IdempotentRequest, idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.policy import Policy, keys


@idempotent(required=True, mode="leased")
def pay(request: IdempotentRequest) -> HttpResponse:
    assert_type(request.idempotency, ExecutionContext)
    assert_type(request.idempotency.derive_key("charge"), str)
    return HttpResponse(request.idempotency.step("charge", str))


@idempotent
def order(request: IdempotentRequest) -> HttpResponse:
    assert_type(request.POST.get("reference"), str | None)
    return HttpResponse(request.idempotency.attempt if request.idempotency else 0)


@idempotent(key=keys.generated)
async def report(request: IdempotentRequest) -> HttpResponse:
    return HttpResponse(await request.idempotency.astep("report", str))


def unannotated(request: HttpRequest) -> Any:
    return request.idempotency  # type: ignore[attr-defined]  # a plain request has none


def policies() -> None:
    assert_type(Policy(ttl=timedelta(days=7), mode="leased").ttl, timedelta | None)
    Policy(ttl=60)  # type: ignore[arg-type]
    Policy(mode="lease")  # type: ignore[arg-type]
    Policy(requierd=True)  # type: ignore[call-arg]
    Policy().replace(requierd=True)  # type: ignore[call-arg]
    Policy().replace(required={"DELETE"}, ttl=None)
    Policy().replace(ttl=60)  # type: ignore[arg-type]
    idempotent(requierd=True)  # type: ignore[call-overload]
    idempotent(mode="lease")  # type: ignore[call-overload]


class Form(View):
    @idempotent
    def post(self, request: IdempotentRequest) -> HttpResponse:
        return HttpResponse(request.idempotency is not None)


class Charges(IdempotentViewMixin, ModelViewSet[Model]):
    request: IdempotentRequest

    def perform_create(self, serializer: BaseSerializer[Model]) -> None:
        assert_type(self.request.idempotency, ExecutionContext)
        serializer.save()

    def capture(self, request: IdempotentRequest) -> Response:
        assert_type(request.idempotency, ExecutionContext)
        return Response({"key": request.idempotency.derive_key("capture")})


class Payments(IdempotentViewMixin, ModelViewSet[Model]):
    request: IdempotentRequest

    def perform_create(self, serializer: BaseSerializer[Model]) -> None:
        serializer.save(attempt=self.request.idempotency.attempt)

    def refund(self, request: Request) -> Response:
        return Response(request.idempotency.key)  # type: ignore[attr-defined]


urlpatterns = [
    path("pay/", pay),
    path("order/", order),
    path("report/", report),
    path("form/", Form.as_view()),
    path("charges/", Charges.as_view({"post": "create"})),
]
