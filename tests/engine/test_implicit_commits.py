"""A statement that ends the transaction in which a claim, its effects and its response belong."""

from __future__ import annotations

import json
import os
from contextlib import closing, nullcontext
from dataclasses import replace
from datetime import timedelta

import pytest
from django.conf import settings
from django.db import connection, connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.admin.changelist import in_state
from idempotency_django.contrib.timeline import HELD, INTERRUPTED, state_of
from idempotency_django.decorators import idempotent
from idempotency_django.models import GRACE, DatabaseNow, IdempotencyKey
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import Claim, Operation, Payload, Record, Status
from idempotency_django.testing import RESPONSE, an_operation, in_threads
from tests.models import Effect
from tests.support.factories import ago
from tests.support.factories import record as a_record
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

ALIASES = list(settings.DATABASES)


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


def commits_at_the_end(request: HttpRequest) -> HttpResponse:
    """The same, with nothing after it."""
    reference = json.loads(request.body)["reference"]
    Effect.objects.create(reference=reference)
    with closing(connection.connection.cursor()) as cursor:
        cursor.execute("COMMIT")
    return JsonResponse({"reference": reference}, status=201)


urlpatterns = [
    path("at-the-end/", idempotent(commits_at_the_end)),
    path("duplicate/", idempotent(meets_its_duplicate)),
    path("driver/", idempotent(runs_as_the_driver_does)),
    path("held/", idempotent(on_interrupted="hold")(runs_as_the_driver_does)),
]


def abandoned(alias: str, operation: Operation) -> Claim:
    """A claim whose transaction was ended by a commit of its own, and whose owner is long gone."""
    claim = just_abandoned(alias, operation)
    old = {"created_at": DatabaseNow() - 2 * GRACE}
    assert IdempotencyKey.objects.using(alias).filter(pk=claim.record_id).update(**old) == 1
    return claim


def just_abandoned(alias: str, operation: Operation) -> Claim:
    """The same of an owner that may still be there."""
    store = DatabaseStore("default", using=alias)
    with store.transaction():
        claim = store.acquire(operation)
    assert isinstance(claim, Claim)
    return claim


def assert_savepoint_is_gone(client: Client, url: str, key: str, first: HttpResponse) -> None:
    """The savepoint went with the request's transaction: nobody is told of a success, and the
    effect that was committed is not repeated before its claim is a minute old.
    """
    assert_problem(first, 503, "store-unavailable")
    assert first.json()["state"] == "unknown"  # type: ignore[attr-defined]
    assert effects() == 1
    retry = post(client, url, key)
    # There, the statements commit by themselves from then on.
    if connection.vendor == "sqlite" or os.environ.get("TEST_PSYCOPG") == "2":
        assert is_replay(retry)
    else:
        assert_problem(retry, 409, "in-progress")
    assert effects() == 1


class TestBehindOurBack:
    """What the driver is given directly, or a script."""

    def test_at_the_end(self, client: Client, atomic: bool) -> None:
        """The completing attempt stores its response, although its transaction is gone."""
        key = new_key()
        first = post(client, "/at-the-end/", key)
        if atomic:
            assert_savepoint_is_gone(client, "/at-the-end/", key, first)
            return
        assert first.status_code == 201
        assert_replays(first, post(client, "/at-the-end/", key))
        assert effects() == 1

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

    def test_duplicate_meanwhile(self, client: Client, atomic: bool) -> None:
        """Whoever sends it again while it still runs is asked to wait, and then gets its answer."""
        key = new_key()
        first = post(client, "/duplicate/", key)
        if atomic:
            assert_savepoint_is_gone(client, "/duplicate/", key, first)
            return
        assert (first.status_code, first.json()) == (201, {"second": 409})
        assert effects() == 1
        assert_replays(first, post(client, "/duplicate/", key))

    def test_failed(self, client: Client, atomic: bool) -> None:
        """What was committed before a failure stays; the key is free for a retry."""
        key = new_key()
        if atomic:  # the key is free after a minute
            with pytest.raises(InterruptedError):
                post(client, "/driver/", key, "fails")
            assert_problem(post(client, "/driver/", key, "fails"), 409, "in-progress")
            assert IdempotencyKey.objects.update(created_at=DatabaseNow() - 2 * GRACE) == 1
            with pytest.raises(InterruptedError):
                post(client, "/driver/", key, "fails")
            assert effects("fails") == 2
            return
        for _ in range(2):
            with pytest.raises(InterruptedError):
                post(client, "/driver/", key, "fails")
            assert record(key).status == "failed"
        assert effects("fails") == 2

    def test_held(self, client: Client, atomic: bool) -> None:
        """A policy that holds what was interrupted asks a person first."""
        key = new_key()
        with pytest.raises(InterruptedError):
            post(client, "/held/", key, "fails")
        assert_problem(post(client, "/held/", key, "fails"), 409, "in-progress")
        assert IdempotencyKey.objects.update(created_at=DatabaseNow() - 2 * GRACE) == 1
        for _ in range(2):
            assert_problem(post(client, "/held/", key, "fails"), 409, "held")
        assert effects("fails") == 1
        assert IdempotencyKey.objects.held().count() == 1


@pytest.mark.parametrize("alias", ALIASES)
class TestRow:
    """A row in progress that has no lease, and is seen, is interrupted after a minute."""

    def test_at_first(self, alias: str) -> None:
        """Until then it is in progress for everybody: its owner may still run."""
        store = DatabaseStore("default", using=alias)
        operation = an_operation(ttl=timedelta(microseconds=1))
        claim = just_abandoned(alias, operation)
        found = store.get(operation.key, operation.scope)
        assert found is not None
        assert not found.interrupted
        for lease in (None, timedelta(seconds=30)):
            again = replace(operation, lease=lease)
            with store.transaction() if lease is None else nullcontext():
                answer = store.acquire(again)
            assert isinstance(answer, Record)
            assert answer.status is Status.IN_PROGRESS
        rows = IdempotencyKey.objects.using(alias)
        row = in_state(rows.all(), Status.IN_PROGRESS).annotate(now=DatabaseNow()).get()
        assert state_of(row) == Status.IN_PROGRESS
        assert (rows.interrupted().count(), store.purge(timedelta(0), 10)) == (0, 0)
        assert store.complete(claim, RESPONSE)

    def test_resumed(self, alias: str) -> None:
        """A retry takes it over, one of several at once, and the late owner cannot complete."""
        store, operation = DatabaseStore("default", using=alias), an_operation()
        late = abandoned(alias, operation)
        found = store.get(operation.key, operation.scope)
        assert found is not None
        assert found.interrupted

        def contend() -> Claim | Record:
            with store.transaction():
                answer = store.acquire(operation)
                if isinstance(answer, Claim):
                    assert store.complete(answer, RESPONSE)
                return answer

        claims = [each for each in in_threads([contend] * 3) if isinstance(each, Claim)]
        assert [claim.attempt for claim in claims] == [2]
        assert not store.complete(late, Payload(500, (), b"late"))

    def test_resumed_under_a_lease(self, alias: str) -> None:
        """So does one whose policy has become leased since."""
        store, operation = DatabaseStore("default", using=alias), an_operation()
        abandoned(alias, operation)
        again = an_operation(key=operation.key, lease=timedelta(seconds=30))
        assert isinstance(store.acquire(again), Claim)

    def test_another_request(self, alias: str) -> None:
        """Another request under its key is refused."""
        store, operation = DatabaseStore("default", using=alias), an_operation()
        abandoned(alias, operation)
        with store.transaction():
            found = store.acquire(an_operation(key=operation.key, fingerprint="0" * 64))
        assert isinstance(found, Record)
        assert found.status is Status.IN_PROGRESS

    def test_owner_that_still_runs(self, alias: str) -> None:
        """MariaDB's named lock outlives a commit, so there nobody runs beside the owner."""
        if connections[alias].vendor != "mysql":
            pytest.skip("ONLY MARIADB'S LOCK OUTLIVES A COMMIT")
        store, operation = DatabaseStore("default", using=alias), an_operation()

        def contend() -> Claim | Record:
            with store.transaction():
                return store.acquire(operation)

        with store.transaction():
            claim = store.acquire(operation)
            assert isinstance(claim, Claim)
            with closing(connections[alias].connection.cursor()) as cursor:
                cursor.execute("COMMIT")
            assert all(isinstance(each, Record) for each in in_threads([contend] * 2))
            assert store.complete(claim, RESPONSE)

    def test_operators(self, alias: str) -> None:
        """The admin shows it, and what settles others settles it."""
        abandoned(alias, an_operation(hold=True))
        abandoned(alias, an_operation())
        rows = IdempotencyKey.objects.using(alias)
        for state in (HELD, INTERRUPTED):
            row = in_state(rows.all(), state).annotate(now=DatabaseNow()).get()
            assert state_of(row) == state
        assert rows.interrupted().count() == 2
        assert in_state(rows.all(), Status.IN_PROGRESS).count() == 0

    def test_purge(self, alias: str) -> None:
        """It is purged when its time is over, unless it is held."""
        for hold in (True, False):
            times = {"created_at": ago(days=2), "purge_at": ago(days=1)}
            a_record(alias, in_progress=True, lease_expires_at=None, hold=hold, **times)
        assert DatabaseStore("default", using=alias).purge(timedelta(0), 10) == 1
        assert IdempotencyKey.objects.using(alias).get().hold

    def test_running_claim_is_not_purged(self, alias: str) -> None:
        """Nobody sees a claim that its transaction still holds."""
        store = DatabaseStore("default", using=alias)
        with store.transaction():
            store.acquire(an_operation())
            assert in_threads([lambda: store.purgeable(timedelta(0))]) == [0]
            transaction.set_rollback(True, using=alias)
