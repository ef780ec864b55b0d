"""What only the database store can show: counts of replays, the lock, faults, replicas."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, OperationalError, connection, transaction
from django.test import Client
from django.urls import path

from idempotency_django.engine import Mismatched, decide
from idempotency_django.errors import OperationInProgress, StoreUnavailable
from idempotency_django.models import DatabaseNow, IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import Step
from idempotency_django.testing import RESPONSE, an_operation, in_threads
from idempotency_django.testing.contract import as_claim
from tests.support.shared import assert_replays, new_key, post, record
from tests.support.views import Mixed

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
    pytest.mark.driver,
]


class Extended(Mixed):
    idempotency_policy = Policy(ttl=timedelta(hours=24), extend_on_replay=True)


urlpatterns = [
    path("protected/", Mixed.as_view()),
    path("extended/", Extended.as_view()),
]


class TestReplayAudit:
    """The count of replays never spoils a response."""

    def test_not_counted(self, client: Client, settings: Any) -> None:
        """It can be switched off."""
        settings.IDEMPOTENCY = {"RECORD_REPLAYS": False}
        key = new_key()
        first = post(client, "/protected/", key)
        assert_replays(first, post(client, "/protected/", key))
        assert record(key).replay_count == 0

    def test_locked_row_is_skipped(self, client: Client) -> None:
        """A replay does not wait for whoever holds the row; it goes uncounted."""
        if connection.vendor == "sqlite":
            pytest.skip("SQLite has no row locks")
        key = new_key()
        first = post(client, "/protected/", key)
        with transaction.atomic():
            IdempotencyKey.objects.select_for_update().get(key=key)
            [again] = in_threads([lambda: post(Client(), "/protected/", key)])
        assert_replays(first, again)
        assert record(key).replay_count == 0

    @pytest.mark.parametrize("url", ["/protected/", "/extended/"])
    def test_error_is_logged(
        self, client: Client, caplog: pytest.LogCaptureFixture, url: str
    ) -> None:
        """When counting fails, the client gets its response and the log says so."""

        def fail(execute: Any, sql: str, *rest: Any) -> Any:
            if "replay_count = replay_count + 1" in sql:
                raise DatabaseError("disk full")
            return execute(sql, *rest)

        key = new_key()
        first = post(client, url, key)
        with connection.execute_wrapper(fail):
            assert_replays(first, post(client, url, key))
        assert "was not counted" in caplog.text


class TestFaults:
    """A store that cannot be reached, or is too busy."""

    @pytest.mark.parametrize("method", ["acquire", "complete", "fail"])
    def test_operational_error(self, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each step translates the loss of its connection."""
        store, operation = DatabaseStore("default"), an_operation()

        def lost(*_: Any, **__: Any) -> None:
            raise OperationalError("server closed the connection unexpectedly")

        with transaction.atomic():
            claim = as_claim(store.acquire(operation))
            monkeypatch.setattr(type(store._dialect), "claim", lost)
            monkeypatch.setattr(type(store._dialect), "execute", lost)
            monkeypatch.setattr(type(store._dialect), "execute_last", lost)
            monkeypatch.setattr(DatabaseStore, "_rows", property(lost))
            steps = {
                "acquire": lambda: store.acquire(operation),
                "complete": lambda: store.complete(claim, RESPONSE),
                "fail": lambda: store.fail(claim, "no"),
            }
            with pytest.raises(StoreUnavailable):
                steps[method]()

    def test_deadlock_is_busy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a database says of contention is "in progress", not a fault."""
        store = DatabaseStore("default")
        codes = {"postgresql": ("sqlstate", "40P01"), "sqlite": ("sqlite_errorname", "SQLITE_BUSY")}

        def contend(*_: Any) -> None:
            cause = Exception(1213)
            if connection.vendor in codes:
                setattr(cause, *codes[connection.vendor])
            raise OperationalError from cause

        monkeypatch.setattr(type(store._dialect), "claim", contend)
        with pytest.raises(OperationInProgress), store.transaction():
            store.acquire(an_operation())

    def test_unknown_database(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A database that the store does not know is refused by name."""
        monkeypatch.setattr("idempotency_django.stores.database.DIALECTS", {})
        with pytest.raises(ImproperlyConfigured, match=repr(connection.vendor)):
            DatabaseStore("default").acquire(an_operation(lease=timedelta(seconds=30)))


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite's lock is the database's")
@pytest.mark.parametrize("first", ["failed", "expired"])
def test_contender_between_look_and_lock(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another request made of the key before it was locked is not taken for a response."""
    lease = timedelta(seconds=30)
    store, operation = DatabaseStore("default"), an_operation(lease=lease)
    other = an_operation(key=operation.key, lease=lease, fingerprint="0" * 64)
    claim = as_claim(store.acquire(operation))
    if first == "failed":
        assert store.fail(claim, "no")
    else:
        assert store.complete(claim, RESPONSE)
        IdempotencyKey.objects.update(expires_at=DatabaseNow() - timedelta(hours=1))
    locked, intruded = DatabaseStore._is_free, list[bool]()

    def intrude() -> None:
        claim = as_claim(store.acquire(other))
        with store.durable("It"):
            assert store.save_step(claim, Step(name="a", attempt=claim.attempt, result="1"))
        assert store.fail(claim, "no")

    def before_another(*args: Any) -> bool:
        is_free = locked(*args)
        if not intruded:
            intruded.append(True)
            in_threads([intrude])
        return is_free

    monkeypatch.setattr(DatabaseStore, "_is_free", before_another)
    assert isinstance(decide(store.acquire(operation), operation), Mismatched)
    assert intruded == [True]


def test_odd_texts_are_storable(client: Client) -> None:
    """A path with NUL, broken UTF-8 and any length is protected as any other."""
    operation = an_operation(
        name="POST /\0" + "é" * 300, principal="user:\0", path="/\udcff\0" + "x" * 5000
    )
    store = DatabaseStore("default")
    with store.transaction():
        claim = as_claim(store.acquire(operation))
        assert store.complete(claim, RESPONSE)
    row = record(operation.key)
    assert "\0" not in row.path + row.operation + row.principal
