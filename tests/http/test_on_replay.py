"""``Policy(on_replay=…)`` alters replays, and neither the first response nor the record."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from idempotency_django import Policy, idempotent
from tests.models import Effect
from tests.support.shared import effects, is_replay, new_key, record

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


def refreshed(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    """Says how many effects there are now, in a header and in the body."""
    assert isinstance(request, HttpRequest)
    response["X-Effects"] = str(Effect.objects.count())
    response.content = json.dumps({**json.loads(response.content), "again": request.path}).encode()
    return response


def create(request: HttpRequest) -> HttpResponse:
    return HttpResponse(json.dumps({"id": Effect.objects.create(reference="a").pk}), "text/plain")


async def later(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    return response


def rebuilt(record: Any, request: HttpRequest) -> HttpResponse:
    return HttpResponse(b'{"id": 17}', "text/plain")


urlpatterns = [
    path(
        "rebuilt/", idempotent(on_replay=refreshed, max_response_bytes=0, rebuild=rebuilt)(create)
    ),
    path(
        "another/",
        idempotent(on_replay=lambda request, response: HttpResponse("{}", "text/plain"))(create),
    ),
    path("wrong/", idempotent(on_replay=lambda request, response: None)(create)),
]


def send(where: str, key: str) -> HttpResponse:
    return Client().post(where, headers={"Idempotency-Key": key})


def test_altered() -> None:
    """A response that is rebuilt is altered each time anew."""
    key = new_key()
    first = send("/rebuilt/", key)
    stored = record(key).response_body
    assert (first.status_code, "X-Effects" in first) == (200, False)
    for _ in range(2):
        replay = send("/rebuilt/", key)
        assert is_replay(replay)
        assert replay["X-Effects"] == "1"
        assert json.loads(replay.content).keys() == {"id", "again"}
    assert record(key).response_body == stored
    assert effects() == 1


def test_another_response() -> None:
    """A response of its own is marked as a replay, too."""
    key = new_key()
    assert not is_replay(send("/another/", key))
    replay = send("/another/", key)
    assert replay.content == b"{}"
    assert replay["Idempotency-Status"].startswith("replayed")
    assert is_replay(replay)


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
        Policy(on_replay=later)
