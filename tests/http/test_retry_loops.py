"""A loop that runs a protected view again: each run has a claim of its own, or replays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import OperationalError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.models import IdempotencyKey
from tests.models import Effect
from tests.support.shared import assert_replays, effects, new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

attempts: list[Any] = []


def work(request: Any) -> dict[str, Any]:
    """An effect; the first run of all ends in a deadlock after it."""
    attempts.append(request.idempotency)
    Effect.objects.create(reference=json.loads(request.body)["reference"])
    if len(attempts) == 1:
        raise OperationalError("deadlock detected")
    return {"attempt": request.idempotency.attempt}


def retried(view: Any) -> Any:
    """A loop for deadlocks, around what is protected."""

    def inner(request: HttpRequest) -> HttpResponse:
        try:
            return view(request)
        except OperationalError:
            return view(request)

    return inner


@idempotent
def function(request: HttpRequest) -> HttpResponse:
    return JsonResponse(work(request), status=201)


class DRF(IdempotentViewMixin, APIView):
    authentication_classes = ()

    def post(self, request: Request) -> Response:
        return Response(work(request._request), status=201)


class Nested(DRF):
    @idempotent
    def post(self, request: Request) -> Response:
        return Response(work(request._request), status=201)


urlpatterns = [
    path("function/", retried(function)),
    path("drf/", retried(DRF.as_view())),
    path("nested/", retried(Nested.as_view())),
]


@pytest.fixture(autouse=True)
def _no_attempts() -> None:
    attempts.clear()


@pytest.mark.parametrize("url", ["function", "drf", "nested"])
def test_second_run_has_a_claim_of_its_own(client: Client, url: str) -> None:
    """After a deadlock the second run is protected: a retry of the request is a replay."""
    key = new_key()
    first = post(client, f"/{url}/", key)
    assert first.status_code == 201
    assert_replays(first, post(client, f"/{url}/", key))
    assert effects() == 1
    assert None not in attempts
    assert IdempotencyKey.objects.get().attempt == 2
