"""What a view writes to the session is committed with the view's effects, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.contrib.auth import login
from django.contrib.auth.models import User
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from tests.models import Effect
from tests.support import effects, is_replay, new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

ENGINES = [f"django.contrib.sessions.backends.{name}" for name in ("db", "cached_db")]


class Killed(BaseException):
    """Stands for a worker that dies, of which no middleware learns."""


def dies() -> None:
    raise Killed


def buy(request: HttpRequest) -> HttpResponse:
    """Counts in the session, and ends as it is told to."""
    reference = json.loads(request.body)["reference"]
    Effect.objects.create(reference=reference)
    request.session["bought"] = request.session.get("bought", 0) + 1
    request.session["basket"]["items"] = []
    request.session.modified = True
    if reference == "dies":
        transaction.on_commit(dies)
    if reference == "login":
        login(request, User.objects.get())
    return JsonResponse(
        {"bought": request.session["bought"]},
        status=409 if reference in ("fails", "login") else 201,
    )


def begins(request: HttpRequest) -> HttpResponse:
    request.session["begun"] = True
    return JsonResponse({}, status=201)


urlpatterns = [
    path("buy/", idempotent(buy)),
    path("begins/", idempotent(begins)),
    path("leased/", idempotent(mode="leased")(buy)),
]


@pytest.fixture(params=[True, False], ids=["atomic requests", "no atomic requests"], autouse=True)
def _atomic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", request.param)


@pytest.fixture(params=ENGINES)
def shopper(request: pytest.FixtureRequest, client: Client, settings: Any) -> Client:
    """A client with a session that has a basket."""
    settings.SESSION_ENGINE = request.param
    session = client.session
    session["basket"] = {"items": ["tea"]}
    session.save()
    return client


def test_worker_that_dies(shopper: Client) -> None:
    """Where the effects are committed, what the session says of them is."""
    key = new_key()
    with pytest.raises(Killed):
        post(shopper, "/buy/", key, "dies")
    retried = post(shopper, "/buy/", key, "dies")
    assert is_replay(retried)
    assert retried.json() == {"bought": 1}
    assert effects("dies") == 1
    assert (shopper.session["bought"], shopper.session["basket"]) == (1, {"items": []})


@pytest.mark.parametrize("reference", ["fails", "login"])
def test_rolled_back(shopper: Client, reference: str) -> None:
    """Where the effects are rolled back, so is what the session says of them."""
    User.objects.create(username="bob")
    for _ in range(2):
        assert post(shopper, "/buy/", new_key(), reference).status_code == 409
        assert dict(shopper.session) == {"basket": {"items": ["tea"]}}
    assert effects(reference) == 0


def test_new_session(client: Client) -> None:
    """A session that the view begins is there for the next request."""
    assert post(client, "/begins/", new_key()).status_code == 201
    assert client.session["begun"]


def test_leased(shopper: Client) -> None:
    """In leased mode there is no transaction, and the session is Django's affair."""
    assert post(shopper, "/leased/", new_key()).status_code == 201
    assert shopper.session["bought"] == 1
