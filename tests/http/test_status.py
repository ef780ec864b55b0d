"""``on_conflict="accepted"``: 202, and the status view that its ``Location`` leads to."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.http import HttpResponse
from django.test import Client
from django.urls import path
from django.utils import timezone

from idempotency_django.decorators import idempotent
from idempotency_django.errors import StoreUnavailable
from idempotency_django.http import IdempotencyStatusView
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.stores import stores
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.testing import an_operation, eventually
from tests.support.attempts import interrupt
from tests.support.shared import (
    assert_problem,
    assert_replays,
    effects,
    is_replay,
    logged_in,
    new_key,
    post,
    record,
)
from tests.support.views import create, during

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

ACCEPTED = Policy(mode="leased", on_conflict="accepted")


urlpatterns = [
    path("accepting/", idempotent(policy=ACCEPTED)(create)),
    path("held/", idempotent(policy=ACCEPTED, on_interrupted="hold")(create)),
    path("short/", idempotent(policy=ACCEPTED, ttl=timedelta(days=1))(create)),
    path("operations/<str:token>/", IdempotencyStatusView.as_view(), name="idempotency-status"),
]


def accepted(client: Client, url: str, key: str, reference: str = "a") -> str:
    """The address that a duplicate is told, whose first request runs and ends."""
    told: list[HttpResponse] = []
    with during(lambda: told.append(post(client, url, key, reference)), reference):
        post(client, url, key, reference)
    assert told[0].status_code == 202
    return str(told[0]["Location"])


def told(client: Client, location: str) -> Any:
    response = client.get(location)
    assert response.status_code == 200
    assert "no-store" in response["Cache-Control"]
    return json.loads(response.content)


def token_of(location: str) -> str:
    return location.rstrip("/").rsplit("/", 1)[1]


class TestAccepted:
    """The response to a duplicate of an operation in progress."""

    def test_duplicate(self) -> None:
        """202 says that it is in progress, where to look, and when; nothing is executed."""
        client, url, key, responses = logged_in("alice"), "/accepting/", new_key(), []
        with during(lambda: responses.extend(post(client, url, key) for _ in range(2))):
            first = post(client, url, key)
        for response in responses:
            assert response.status_code == 202
            assert json.loads(response.content) == {"status": "in_progress"}
            assert response["Location"].startswith("/operations/")
            assert response["Cache-Control"] == "no-store"
            assert not is_replay(response)
        assert_replays(first, post(client, url, key))
        assert effects() == 1
        told(client, responses[0]["Location"])

    def test_held(self, client: Client) -> None:
        """What is held is told so: waiting would not help."""
        key, responses = new_key(), []

        def retry() -> None:
            interrupt(DatabaseStore("default"), an_operation(key=key))
            responses.append(post(Client(), "/held/", key))

        with during(retry):
            post(client, "/held/", key)
        assert_problem(responses[0], 409, "held")


class TestStatus:
    """What the status view tells the caller."""

    def test_in_progress(self) -> None:
        """While it runs: in progress, and which attempt."""
        client, key, seen = logged_in("alice"), new_key(), []

        def look() -> None:
            location = post(client, "/accepting/", key)["Location"]
            seen.append(told(client, location))

        with during(look):
            post(client, "/accepting/", key)
        assert seen == [{"status": "in_progress", "attempt": 1}]

    def test_failed(self) -> None:
        """Failed: a retry is a new attempt; why is not told."""
        client, key = logged_in("alice"), new_key()
        client.raise_request_exception = False
        location = accepted(client, "/accepting/", key, "error")
        assert told(client, location) == {"status": "failed", "attempt": 1}
        assert post(client, "/accepting/", key, "error").status_code == 500
        assert told(client, location) == {"status": "failed", "attempt": 2}

    @pytest.mark.parametrize(("url", "named"), [("/accepting/", "interrupted"), ("/held/", "held")])
    def test_interrupted(self, url: str, named: str) -> None:
        """Interrupted, where a retry resumes it, or held."""
        client, key, seen = logged_in("alice"), new_key(), []

        def look() -> None:
            location = post(client, url, key)["Location"]
            interrupt(DatabaseStore("default"), an_operation(key=key))
            seen.append(told(client, location))

        with during(look):
            post(client, url, key)
        assert seen == [{"status": named, "attempt": 1}]


class TestPrivacy:
    """Nobody else is told anything."""

    def test_nothing_but_the_status(self) -> None:
        """Who finds the address learns how far the operation is, and gets no response."""
        alice = logged_in("alice")
        location = accepted(alice, "/accepting/", new_key())
        for client in (alice, logged_in("bob"), Client()):
            assert told(client, location) == {"status": "completed", "attempt": 1}

    def test_tampered(self) -> None:
        """An address that was changed in any place, cut or made up is 404."""
        alice = logged_in("alice")
        location = accepted(alice, "/accepting/", new_key())
        token, base = token_of(location), location[: location.index(token_of(location))]
        for place in range(0, len(token), 7):
            other = "A" if token[place] != "A" else "B"
            changed = token[:place] + other + token[place + 1 :]
            assert alice.get(f"{base}{changed}/").status_code == 404, changed
        for made_up in ("x", ":", "::", "a:b:c", token[:-1], token + "A", token * 50, "%00", "ü"):
            assert alice.get(f"{base}{made_up}/").status_code == 404, made_up

    def test_expired(self) -> None:
        """What has expired, or was purged, is 404."""
        alice, key = logged_in("alice"), new_key()
        location = accepted(alice, "/short/", key)
        assert alice.get(location).status_code == 200
        past = timezone.now() - timedelta(hours=1)
        IdempotencyKey.objects.filter(key=key).update(expires_at=past, purge_at=past)
        eventually(lambda: record(key).expires_at <= timezone.now())
        assert alice.get(location).status_code == 404
        assert stores["default"].purge(timedelta(0), 10) == 1
        assert alice.get(location).status_code == 404

    def test_store_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the store cannot be reached, it is 503, as the request itself would be."""
        client = logged_in("alice")
        location = accepted(client, "/accepting/", new_key())

        def get(*_: object) -> None:
            raise StoreUnavailable

        monkeypatch.setattr(stores["default"], "get", get)
        response = client.get(location)
        assert_problem(response, 503, "store-unavailable")
