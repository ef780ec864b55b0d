"""A statement that ends the transaction in which a claim, its effects and its response belong."""

from __future__ import annotations

import json
import os
from contextlib import closing

import pytest
from django.db import connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import Claim, Record
from idempotency_django.testing import RESPONSE, an_operation, in_threads
from tests.models import Effect
from tests.support.factories import ago
from tests.support.shared import (
    assert_problem,
    assert_replays,
    effects,
    is_replay,
    new_key,
    post,
    record,
)

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.urls(__name__),
    pytest.mark.driver,
]

mariadb_only = pytest.mark.skipif(
    connection.vendor != "mysql", reason="ONLY MARIADB WRITES A ROW BEFORE THE RESPONSE"
)


def end_unseen() -> None:
    """End the transaction by the driver's own cursor, of which Django does not know."""
    with closing(connection.connection.cursor()) as cursor:
        if connection.vendor == "sqlite":
            cursor.executescript("SELECT 1;")
        else:
            cursor.execute("COMMIT")


def meets_its_duplicate(request: HttpRequest) -> HttpResponse:
    """Ends its transaction unseen, and is sent a second time before it returns."""
    Effect.objects.create(reference="a")
    if "X-Second" in request.headers:
        return JsonResponse({}, status=201)
    end_unseen()
    key, again = request.headers["Idempotency-Key"].strip('"'), {"X-Second": "1"}
    [second] = in_threads([lambda: post(Client(), request.path, key, headers=again).status_code])
    return JsonResponse({"second": second}, status=201)


def runs_as_the_driver_does(request: HttpRequest) -> HttpResponse:
    """The same by the driver's own cursor, of which Django does not know."""
    reference = json.loads(request.body)["reference"]
    Effect.objects.create(reference=reference)
    end_unseen()
    Effect.objects.create(reference="after")
    if reference == "fails":
        raise InterruptedError
    return JsonResponse({"reference": reference}, status=201)


urlpatterns = [
    path("duplicate/", idempotent(meets_its_duplicate)),
    path("driver/", idempotent(runs_as_the_driver_does)),
    path("held/", idempotent(on_interrupted="hold")(runs_as_the_driver_does)),
]


def assert_savepoint_is_gone(client: Client, url: str, key: str, first: HttpResponse) -> None:
    """The savepoint went with the request's transaction: nobody is told of a success."""
    assert_problem(first, 503, "store-unavailable")
    assert first.json()["state"] == "unknown"  # type: ignore[attr-defined]
    assert effects() == 1
    retry = post(client, url, key)
    if connection.vendor == "sqlite" or os.environ.get("TEST_PSYCOPG") == "2":
        assert is_replay(retry)  # there, the statements commit by themselves from then on
    elif connection.vendor == "mysql":
        assert_problem(retry, 409, "in-progress")  # the row of the claim was committed, too
    else:
        assert_problem(retry, 503, "store-unavailable")  # the view has run again
        return
    assert effects() == 1


class TestBehindOurBack:
    """What the driver is given directly, or a script."""

    def test_completed(self, client: Client, atomic: bool) -> None:
        """All was committed, so its response is stored."""
        key = new_key()
        first = post(client, "/driver/", key)
        if atomic:
            assert_savepoint_is_gone(client, "/driver/", key, first)
            return
        assert first.status_code == 201
        assert_replays(first, post(client, "/driver/", key))
        assert (effects(), effects("after")) == (1, 1)

    def test_failed(self, client: Client) -> None:
        """What was committed before a failure stays; the key is free for a retry."""
        key = new_key()
        for _ in range(2):
            with pytest.raises(InterruptedError):
                post(client, "/driver/", key, "fails")
            assert record(key).status == "failed"
        assert effects("fails") == 2

    @mariadb_only
    def test_duplicate_meanwhile(self, client: Client) -> None:
        """Whoever sends it again while it still runs is asked to wait, and then gets its response.

        There, a statement such as ALTER TABLE commits; elsewhere, only what goes behind Django's
        back does.
        """
        key = new_key()
        first = post(client, "/duplicate/", key)
        assert (first.status_code, first.json()) == (201, {"second": 409})  # type: ignore[attr-defined]
        assert effects() == 1
        assert_replays(first, post(client, "/duplicate/", key))

    @mariadb_only
    def test_held(self, client: Client) -> None:
        """A policy that holds what was interrupted asks a person first."""
        key = new_key()
        with pytest.raises(InterruptedError):
            post(client, "/held/", key, "fails")
        assert_problem(post(client, "/held/", key, "fails"), 409, "in-progress")
        assert IdempotencyKey.objects.update(lease_expires_at=ago(seconds=1)) == 1
        for _ in range(2):
            assert_problem(post(client, "/held/", key, "fails"), 409, "held")
        assert effects("fails") == 1
        assert IdempotencyKey.objects.held().count() == 1


def test_row_of_an_earlier_attempt() -> None:
    """If a claim on a row is committed too early, it is interrupted after a minute, everywhere."""
    store, operation = DatabaseStore("default"), an_operation()
    with store.transaction():
        failed = store.acquire(operation)
        assert isinstance(failed, Claim)
        assert store.fail(failed, "ValueError")
    with store.transaction():
        late = store.acquire(operation)
    assert isinstance(late, Claim)
    with store.transaction():
        found = store.acquire(operation)
    assert isinstance(found, Record)
    assert found.lease_left is not None
    assert 50 < found.lease_left <= 60
    IdempotencyKey.objects.update(lease_expires_at=ago(seconds=1))
    with store.transaction():
        claim = store.acquire(operation)
        assert isinstance(claim, Claim)
        assert (claim.attempt, claim.interrupted) == (3, True)
        assert store.complete(claim, RESPONSE)
    with store.transaction():
        assert not store.complete(late, RESPONSE)
