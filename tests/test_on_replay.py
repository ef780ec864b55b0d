"""``Policy(on_replay=…)`` alters replays, and neither the first response nor the record."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django import Policy, idempotent
from idempotency_django.drf import IdempotentViewMixin
from tests.models import Effect
from tests.support import effects, is_replay, new_key, record

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


def refreshed(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    """Says how many effects there are now, in a header and in the body."""
    response["X-Effects"] = str(Effect.objects.count())
    response.content = json.dumps({**json.loads(response.content), "again": request.path}).encode()
    return response


def create(request: HttpRequest) -> HttpResponse:
    return HttpResponse(json.dumps({"id": Effect.objects.create(reference="a").pk}))


async def acreate(request: HttpRequest) -> HttpResponse:
    return HttpResponse(json.dumps({"id": (await Effect.objects.acreate(reference="a")).pk}))


class Api(IdempotentViewMixin, APIView):
    authentication_classes = ()
    idempotency_policy = Policy(on_replay=refreshed)

    def post(self, request: Request) -> Response:
        return Response({"id": Effect.objects.create(reference="a").pk})


def rebuilt(record: Any, request: HttpRequest) -> HttpResponse:
    return HttpResponse(b'{"id": 17}')


urlpatterns = [
    path("plain/", idempotent(on_replay=refreshed)(create)),
    path("async/", idempotent(on_replay=refreshed)(acreate)),
    path("api/", Api.as_view()),
    path(
        "rebuilt/", idempotent(on_replay=refreshed, max_response_bytes=0, rebuild=rebuilt)(create)
    ),
    path("wrong/", idempotent(on_replay=lambda request, response: None)(create)),
]


def send(where: str, key: str) -> HttpResponse:
    headers = {"Idempotency-Key": key}
    if where == "/async/":
        response: HttpResponse = async_to_sync(AsyncClient().post)(where, headers=headers)
        return response
    return Client().post(where, headers=headers)


@pytest.mark.parametrize("where", ["/plain/", "/async/", "/api/", "/rebuilt/"])
def test_altered(where: str) -> None:
    """A replay is altered each time anew, from the response that is stored."""
    key = new_key()
    first = send(where, key)
    stored = record(key).response_body
    assert (first.status_code, "X-Effects" in first) == (200, False)
    for _ in range(2):
        replay = send(where, key)
        assert is_replay(replay)
        assert replay["X-Effects"] == "1"
        assert json.loads(replay.content).keys() == {"id", "again"}
    assert record(key).response_body == stored
    assert effects() == 1


def test_wrong_return() -> None:
    """A function that returns no response is an error that says so; the effect stays one."""
    key = new_key()
    assert send("/wrong/", key).status_code == 200
    with pytest.raises(ImproperlyConfigured, match="returned a NoneType; it must return the resp"):
        send("/wrong/", key)
    assert effects() == 1


def test_refused() -> None:
    """A coroutine function is refused where the policy is made."""
    with pytest.raises(ImproperlyConfigured, match="must be None or a plain function of a request"):
        Policy(on_replay=acreate)
