"""What only the database store can show: budgets, the lock, faults, replicas."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, OperationalError, connection, connections, transaction
from django.test import Client
from django.urls import path

from idempotency_django.engine import Mismatched, Result, decide, run
from idempotency_django.errors import OperationInProgress, StoreUnavailable
from idempotency_django.models import DatabaseNow, IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.stores.database import DIALECTS, DatabaseStore
from idempotency_django.stores.records import Claim, Status, Step
from idempotency_django.testing import RESPONSE, an_operation, in_threads
from tests.models import Effect
from tests.settings import ALIASES
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

    def test_counted(self, client: Client) -> None:
        """Replays one after another are counted exactly, and dated."""
        key = new_key()
        post(client, "/protected/", key)
        for _ in range(3):
            post(client, "/protected/", key)
        row = record(key)
        assert row.replay_count == 3
        assert row.completed_at is not None
        assert row.last_replayed_at is not None
        assert row.created_at <= row.completed_at <= row.last_replayed_at

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
            claim = store.acquire(operation)
            assert isinstance(claim, Claim)
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

    def test_shared_memory_is_busy(self) -> None:
        """Contention for a SQLite database in memory, as test databases are, is no fault either."""
        name = "file:shared?mode=memory&cache=shared"
        holder, other = (sqlite3.connect(name, uri=True, isolation_level=None) for _ in range(2))
        try:
            holder.execute("CREATE TABLE t (x)")
            holder.execute("BEGIN IMMEDIATE")
            holder.execute("INSERT INTO t VALUES (1)")
            for sql in ("SELECT * FROM t", "BEGIN IMMEDIATE", "INSERT INTO t VALUES (2)"):
                with pytest.raises(sqlite3.OperationalError) as caught:
                    other.execute(sql).fetchall()
                error = OperationalError()
                error.__cause__ = caught.value
                assert DIALECTS["sqlite"]("default").is_busy(error)
        finally:
            holder.close()
            other.close()

    def test_unknown_database(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A database that the store does not know is refused by name."""
        monkeypatch.setattr("idempotency_django.stores.database.DIALECTS", {})
        with pytest.raises(ImproperlyConfigured, match=repr(connection.vendor)):
            DatabaseStore("default").acquire(an_operation(lease=timedelta(seconds=30)))


class TestLock:
    """Who holds a key, and what others see."""

    @pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite's lock is the database's")
    @pytest.mark.parametrize("first", ["failed", "expired"])
    def test_contender_between_look_and_lock(
        self, first: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What another request made of the key before it was locked is not taken for a response."""
        lease = timedelta(seconds=30)
        store, operation = DatabaseStore("default"), an_operation(lease=lease)
        other = an_operation(key=operation.key, lease=lease, fingerprint="0" * 64)
        claim = store.acquire(operation)
        assert isinstance(claim, Claim)
        if first == "failed":
            assert store.fail(claim, "no")
        else:
            assert store.complete(claim, RESPONSE)
            IdempotencyKey.objects.update(expires_at=DatabaseNow() - timedelta(hours=1))
        locked, intruded = DatabaseStore._is_free, list[bool]()

        def intrude() -> None:
            claim = store.acquire(other)
            assert isinstance(claim, Claim)
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


@pytest.mark.skipif("sqlite" not in ALIASES, reason="SQLite's one write lock")
@pytest.mark.django_db(transaction=True, databases="__all__")
class TestBusySQLite:
    """Somebody else holds the one write lock of SQLite for too long."""

    using: ClassVar[str] = ALIASES.get("sqlite", "")

    @pytest.fixture
    def impatient(self) -> Iterator[DatabaseStore]:
        """A store that waits for the lock for a moment only."""
        connections[self.using].close()
        options = connections[self.using].settings_dict["OPTIONS"]
        timeout, options["timeout"] = options["timeout"], 0.05
        yield DatabaseStore("default", using=self.using)
        connections[self.using].close()
        options["timeout"] = timeout

    @contextmanager
    def locked(self) -> Iterator[None]:
        name = connections[self.using].settings_dict["NAME"]
        holder = sqlite3.connect(name, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            holder.close()

    @pytest.mark.parametrize("kind", ["step", "fence", "handler"])
    def test_transaction_that_cannot_begin(self, impatient: DatabaseStore, kind: str) -> None:
        """So is whatever a claim's owner begins: a step, a fenced or its handler's transaction."""
        claim = impatient.acquire(an_operation(lease=timedelta(seconds=30)))
        assert isinstance(claim, Claim)
        begins = {
            "step": impatient.durable("It"),
            "fence": impatient.fenced(claim),
            "handler": impatient.transaction(),
        }[kind]
        with self.locked(), pytest.raises(OperationInProgress), begins:
            pytest.fail("It began.")
        with impatient.durable("It"):
            pass

    @pytest.mark.parametrize("kind", ["request", "step", "fence"])
    def test_transaction_that_cannot_end(self, impatient: DatabaseStore, kind: str) -> None:
        """At COMMIT, where a reader is in the way, nobody says that nothing was executed; but what
        is one transaction as a whole is said to have rolled back.
        """
        refused, told = {
            "request": (OperationInProgress, "could not commit.* has rolled back"),
            "step": (StoreUnavailable, "so the result is unknown"),
            "fence": (StoreUnavailable, "so the result is unknown"),
        }[kind]
        operation = an_operation(lease=None if kind == "request" else timedelta(seconds=30))
        reader = sqlite3.connect(connections[self.using].settings_dict["NAME"])
        with closing(reader), pytest.raises(refused, match=told), ExitStack() as stack:
            if kind == "request":
                stack.enter_context(impatient.transaction())
                found = impatient.acquire(operation)
            else:
                found = impatient.acquire(operation)
                assert isinstance(found, Claim)
                begun = impatient.durable("It") if kind == "step" else impatient.fenced(found)
                stack.enter_context(begun)
            assert isinstance(found, Claim)
            Effect.objects.using(self.using).create(reference="a")
            reader.execute("BEGIN")
            reader.execute("SELECT 1 FROM django_migrations").fetchone()
        assert not Effect.objects.using(self.using).exists()

    def test_attempt_that_cannot_commit(self, impatient: DatabaseStore) -> None:
        """An attempt that is refused at COMMIT has failed as any other: the record says so."""
        operation = an_operation()
        reader = sqlite3.connect(connections[self.using].settings_dict["NAME"])

        def execute(execution: Any) -> Result:
            Effect.objects.using(self.using).create(reference="a")
            reader.execute("BEGIN")
            reader.execute("SELECT 1 FROM django_migrations").fetchone()
            return Result("response", RESPONSE)

        def recover(error: Exception) -> Result:
            reader.close()  # it is away when the failure is written down
            raise error

        with closing(reader), pytest.raises(OperationInProgress, match="has rolled back"):
            run(impatient, operation, execute, recover)
        row = IdempotencyKey.objects.using(self.using).get()
        assert (row.status, row.attempt) == (Status.FAILED, 1)
        assert not Effect.objects.using(self.using).exists()


class ReadsElsewhere:
    """A router that sends reads to a replica, which lags behind for ever."""

    def db_for_read(self, model: Any, **_: Any) -> str:
        return "replica"

    def db_for_write(self, model: Any, **_: Any) -> str:
        return "default"


def test_reads_do_not_go_to_a_replica(client: Client, settings: Any) -> None:
    """Every statement of the store, and a purge, goes to the database that is written to."""
    key = new_key()
    first = post(client, "/protected/", key)
    settings.DATABASE_ROUTERS = [f"{__name__}.ReadsElsewhere"]
    store = DatabaseStore("default")
    operation = an_operation()
    with store.transaction():
        claim = store.acquire(operation)
        assert isinstance(claim, Claim)
        store.fail(claim, "no")
    with store.transaction():
        assert isinstance(store.acquire(operation), Claim)
    assert store.purge(timedelta(0), 10) == 0
    assert_replays(first, post(client, "/protected/", key))


def test_odd_texts_are_storable(client: Client) -> None:
    """A path with NUL, broken UTF-8 and any length is protected as any other."""
    operation = an_operation(
        name="POST /\0" + "é" * 300, principal="user:\0", path="/\udcff\0" + "x" * 5000
    )
    store = DatabaseStore("default")
    with store.transaction():
        claim = store.acquire(operation)
        assert isinstance(claim, Claim)
        assert store.complete(claim, RESPONSE)
    row = record(operation.key)
    assert "\0" not in row.path + row.operation + row.principal
