"""``ENABLED = False``: nothing is protected, refused or stored, however it would be."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.checks import run_checks
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.urls import path

from idempotency_django import aidempotent_call, idempotent, idempotent_call
from idempotency_django.contrib.jobs import idempotent_job
from idempotency_django.engine.functions import idempotent_outcome
from idempotency_django.models import IdempotencyKey
from tests.models import Effect
from tests.support import effects, is_replay, new_key, post
from tests.ways import MIDDLEWARE, WAYS, Way

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


@dataclass
class Made:
    number: int


@idempotent(required=True, mode="leased")
def stepping(request: HttpRequest) -> HttpResponse:
    execution: Any = request.idempotency  # type: ignore[attr-defined]
    with execution.atomic():
        Effect.objects.create(reference="a")
    return HttpResponse(execution.step("one", lambda: execution.attempt))


@idempotent(required=True)
async def astepping(request: HttpRequest) -> HttpResponse:
    execution: Any = request.idempotency  # type: ignore[attr-defined]
    await Effect.objects.acreate(reference="a")
    return HttpResponse(await execution.astep("one", lambda: execution.attempt))


@idempotent
def optional(request: HttpRequest) -> HttpResponse:
    return HttpResponse(str(request.idempotency))  # type: ignore[attr-defined]


urlpatterns = [
    *(path(way.path.removeprefix("/"), way.view) for way in WAYS),
    path("stepping/", stepping),
    path("astepping/", astepping),
    path("optional/", optional),
    path("refusing/", idempotent(lambda request: HttpResponse(status=400))),
    path("derived/", idempotent(key=lambda invocation: "order-17")(optional.__wrapped__)),
]


@pytest.fixture(autouse=True)
def _off(settings: Any) -> None:
    settings.MIDDLEWARE = MIDDLEWARE
    settings.IDEMPOTENCY = {"ENABLED": False}


# One view reads a lazy user in async code, which the protection has loaded.
@pytest.mark.parametrize(
    "way", [way for way in WAYS if way.name != "async-ninja"], ids=lambda way: way.name
)
def test_every_way(way: Way, alice: Client) -> None:
    """Each request runs, whatever protects the view, and no record is written."""
    key = new_key()
    for _ in range(2):
        response = post(alice, way.path, key)
        assert response.status_code == 201
        assert not is_replay(response)
    assert effects() == 2
    assert not IdempotencyKey.objects.exists()


@pytest.mark.parametrize("key", ["a", "malformed key, guessable", None])
def test_keys(key: str | None) -> None:
    """No key is missing, malformed or guessable; the view finds an attempt, and calls its steps."""
    headers = {"Idempotency-Key": key} if key else {}
    for _ in range(2):
        response = Client().post("/stepping/", headers=headers)
        assert (response.status_code, response.content) == (200, b"1")
        response = async_to_sync(AsyncClient().post)("/astepping/", headers=headers)
        assert (response.status_code, response.content) == (200, b"1")
    assert effects() == 4
    assert not IdempotencyKey.objects.exists()


def test_optional_key() -> None:
    """Where the key is optional, a view without one finds no attempt, as usual."""
    assert Client().post("/optional/").content == b"None"
    assert b"attempt 1" in Client().post("/optional/", headers={"Idempotency-Key": "a"}).content
    assert b"attempt 1" in Client().post("/derived/").content
    assert Client().get("/optional/", headers={"Idempotency-Key": "a"}).content == b"None"


def test_status() -> None:
    """Each response to a key says that it has no effect, whatever its status is."""
    response = Client().post("/refusing/", headers={"Idempotency-Key": new_key()})
    assert (response.status_code, response["Idempotency-Status"]) == (400, "ignored")


def test_calls() -> None:
    """Calls and jobs run each time; the result reads back from JSON, as usual."""

    @idempotent_job(key="order-{order}")
    def job(order: int) -> int:
        return Effect.objects.create(reference="a").pk

    async def acall(execution: Any) -> tuple[int, ...]:
        return (execution.attempt,)

    async def typed(execution: Any) -> Made:
        return Made(execution.attempt)

    options = {"key": "one", "scope": "tests"}
    results = [idempotent_call(lambda _: Effect.objects.count(), **options), job(1), job(1)]
    assert results[1] != results[2]
    assert idempotent_call(lambda _: effects(), **options) == 2
    assert idempotent_outcome(lambda execution: (execution.attempt,), **options).result == [1]
    assert not idempotent_outcome(lambda _: 1, **options).replayed
    assert asyncio.run(aidempotent_call(acall, **options)) == [1]
    assert asyncio.run(aidempotent_call(typed, **options)) == Made(1)
    assert not IdempotencyKey.objects.exists()


@pytest.mark.parametrize(("debug", "enabled", "count"), [(0, 0, 1), (1, 0, 0), (0, 1, 0)])
def test_check(debug: int, enabled: int, count: int, settings: Any) -> None:
    """The system checks warn of it where DEBUG is off."""
    settings.DEBUG = bool(debug)
    settings.IDEMPOTENCY = {"ENABLED": bool(enabled)}
    found = [each for each in run_checks() if each.id == "idempotency_django.W062"]
    assert len(found) == count
