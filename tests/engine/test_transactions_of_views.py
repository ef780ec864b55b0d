"""What a view does to transactions and autocommit, and what it is told."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections, connection, connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.testing import RESPONSE, an_operation, in_threads
from idempotency_django.testing.contract import as_claim, as_record
from tests.models import Effect
from tests.support.factories import ago
from tests.support.shared import (
    assert_problem,
    assert_replays,
    close_connections,
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


def durable() -> None:
    with transaction.atomic(durable=True):
        Effect.objects.create(reference="durable")


def closes() -> None:
    close_connections(close_old_connections)


def closes_and_asks() -> None:
    closes()
    Effect.objects.count()


WAYS = {
    "durable": durable,
    "closes": closes,
    "closes-and-asks": closes_and_asks,
}


def create(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="before")
    WAYS[json.loads(request.body)["reference"]]()
    return JsonResponse({}, status=201)


def leaves_it_off(request: HttpRequest) -> HttpResponse:
    """Commits by hand what it wants to, and leaves it to somebody else to tidy up."""
    reference = json.loads(request.body)["reference"]
    transaction.set_autocommit(False)
    Effect.objects.create(reference=reference)
    if reference == "commits":
        transaction.commit()
    if reference == "fails":
        raise InterruptedError
    return JsonResponse({}, status=201)


urlpatterns = [
    path("view/", idempotent(create)),
    path("leased/", idempotent(mode="leased")(create)),
    path("leaves/", idempotent(mode="leased")(leaves_it_off)),
]


@pytest.mark.parametrize("way", WAYS)
def test_refused(client: Client, way: str, atomic: bool) -> None:
    """The error names the transaction and the way out; nothing was done, and the key is free."""
    key = new_key()
    for attempt in (1, 2):
        with pytest.raises(ImproperlyConfigured, match=r"within a transaction, .*mode='leased'"):
            post(client, "/view/", key, way)
        if atomic:  # the record of the attempt has gone with the request's transaction
            assert not IdempotencyKey.objects.exists()
        else:
            assert (record(key).status, record(key).attempt) == ("failed", attempt)
            assert "mode='leased'" in record(key).error
    assert effects("before") == effects("durable") == 0


@pytest.mark.parametrize("way", WAYS)
def test_leased(client: Client, way: str) -> None:
    """In leased mode a view runs in no transaction, and may do all of this."""
    key = new_key()
    first = post(client, "/leased/", key, way)
    assert first.status_code == 201
    assert_replays(first, post(client, "/leased/", key, way))


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``AUTOCOMMIT`` is off in the settings."""
    monkeypatch.setitem(connections.settings["default"], "AUTOCOMMIT", False)
    connection.close()
    transaction.set_autocommit(False)
    yield
    transaction.rollback()
    connection.close()
    monkeypatch.undo()


@pytest.mark.usefixtures("off")
@pytest.mark.parametrize("atomic_requests", [True, False])
@pytest.mark.parametrize("url", ["/view/", "/leased/"])
def test_autocommit_off_is_refused(
    client: Client, url: str, atomic_requests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with a key is refused where nothing would be committed."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic_requests)
    within = atomic_requests and url == "/leased/"
    told = "non_atomic_requests" if within else "AUTOCOMMIT"
    with pytest.raises(ImproperlyConfigured, match=told):
        post(client, url, new_key(), "durable")
    assert effects("before") == 0


class TestLeftOff:
    """A leased view that leaves autocommit off."""

    @pytest.mark.parametrize("reference", ["commits", "leaves"])
    def test_refused(self, client: Client, reference: str) -> None:
        """Its result, which nothing would commit, is refused with what to do; and so is the effect
        that it has not committed. A retry finds the key in progress until the lease is over.
        """
        key = new_key()
        with pytest.raises(ImproperlyConfigured, match=r"The result of .*set_autocommit\(True\)"):
            post(client, "/leaves/", key, reference)
        connection.close_if_unusable_or_obsolete()  # as Django does when a request ends
        assert effects(reference) == (reference == "commits")
        assert record(key).status == "in_progress"

    def test_failed(self, client: Client) -> None:
        """Its error is the one that is told."""
        key = new_key()
        with pytest.raises(InterruptedError):
            post(client, "/leaves/", key, "fails")
        connection.close_if_unusable_or_obsolete()
        assert effects("fails") == 0


# A statement that ends the transaction in which a claim, its effects and its response belong.


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


urlpatterns += [
    path("duplicate/", idempotent(meets_its_duplicate)),
    path("driver/", idempotent(runs_as_the_driver_does)),
    path("held-driver/", idempotent(on_interrupted="hold")(runs_as_the_driver_does)),
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
            post(client, "/held-driver/", key, "fails")
        assert_problem(post(client, "/held-driver/", key, "fails"), 409, "in-progress")
        assert IdempotencyKey.objects.update(lease_expires_at=ago(seconds=1)) == 1
        for _ in range(2):
            assert_problem(post(client, "/held-driver/", key, "fails"), 409, "held")
        assert effects("fails") == 1
        assert IdempotencyKey.objects.held().count() == 1


def test_row_of_an_earlier_attempt() -> None:
    """If a claim on a row is committed too early, it is interrupted after a minute, everywhere."""
    store, operation = DatabaseStore("default"), an_operation()
    with store.transaction():
        failed = as_claim(store.acquire(operation))
        assert store.fail(failed, "ValueError")
    with store.transaction():
        late = as_claim(store.acquire(operation))
    with store.transaction():
        found = as_record(store.acquire(operation))
    assert found.lease_left is not None
    assert 50 < found.lease_left <= 60
    IdempotencyKey.objects.update(lease_expires_at=ago(seconds=1))
    with store.transaction():
        claim = as_claim(store.acquire(operation))
        assert (claim.attempt, claim.interrupted) == (3, True)
        assert store.complete(claim, RESPONSE)
    with store.transaction():
        assert not store.complete(late, RESPONSE)
