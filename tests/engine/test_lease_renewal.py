"""Renewing many leases from one thread, on a connection that nobody else can take."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import OperationalError, connection, connections
from django.db.backends.signals import connection_created

from idempotency_django import engine
from idempotency_django.engine import Executed, InProgress, Outcome, Replayed, Result, leases
from idempotency_django.engine.leases import Lease, kept_alive
from idempotency_django.models import IdempotencyKey, IdempotencyStep
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim, Operation, Payload
from idempotency_django.testing import PATIENCE, an_operation, eventually
from tests.models import Effect
from tests.settings import ALIASES
from tests.support.attempts import aattempt, attempt
from tests.support.machine import patience
from tests.support.shared import effects

pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__"), pytest.mark.driver]


@contextmanager
def connections_of_heartbeats() -> Iterator[list[Any]]:
    """The connections that the heartbeats open meanwhile."""
    opened: list[Any] = []

    def watch(connection: Any, **_: Any) -> None:
        if threading.current_thread().name.startswith("idempotency-heartbeat"):
            opened.append(connection)

    connection_created.connect(watch)
    try:
        yield opened
    finally:
        connection_created.disconnect(watch)


@pytest.mark.parametrize("database", list(ALIASES))
def test_connections_do_not_grow_with_the_leases(database: str) -> None:
    """Leases that are due together are renewed over one connection, not each over its own."""
    count = 60
    store = DatabaseStore(str(uuid4()), using=ALIASES[database])
    rows = IdempotencyKey.objects.using(store.using)
    with connections_of_heartbeats() as opened, ExitStack() as kept:
        claims = [store.acquire(an_operation(lease=timedelta(seconds=6))) for _ in range(count)]
        keys = [claim.key for claim in claims]
        ends = dict(rows.filter(key__in=keys).values_list("key", "lease_expires_at"))
        for claim in claims:
            assert isinstance(claim, Claim)
            kept.enter_context(kept_alive(Lease(store, claim, 6, claim.asked_at)))

        def renewed() -> bool:
            now = dict(rows.filter(key__in=keys).values_list("key", "lease_expires_at"))
            return all(now[key] > ends[key] for key in keys)

        eventually(renewed)
    assert 0 < len(opened) < count / 10, len(opened)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_that_has_died_is_replaced() -> None:
    """What ends the heartbeat's thread ends no later lease: the next one starts another thread."""
    store = Noted(str(uuid4()))
    store.responses.append(sys.exit)
    with kept_alive(a_lease(store, 0.3)):
        eventually(lambda: store.asked and not running(store))
        with kept_alive(a_lease(store, 0.3)):
            eventually(lambda: len(store.asked) > 2)


DAY = 86400.0
"""Seconds of a lease whose next renewal no test waits for."""


class Noted(MemoryStore):
    """Notes when a heartbeat has asked it for more time, and when one has let go of it."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self.asked: list[float] = []
        self.let_go = threading.Event()
        self.responses: list[Callable[[], None]] = []

    def extend(self, claim: Claim, seconds: float) -> bool:
        self.asked.append(seconds)
        if self.responses:
            self.responses.pop(0)()
        return True

    @contextmanager
    def dedicated_connection(self, place: Hashable) -> Iterator[None]:
        with super().dedicated_connection(place):
            yield
        self.let_go.set()


def a_lease(store: Noted, seconds: float = DAY) -> Lease:
    """A lease of a claim of its own."""
    return Lease(store, Claim(an_operation(), 1, "token"), seconds, time.monotonic())


def running(store: Noted) -> bool:
    """Whether the thread of the store's heartbeat is there."""
    return any(t.name.endswith(store.alias) for t in threading.enumerate())


def asleep(store: Noted) -> None:
    """Wait until the store's heartbeat sleeps until a lease is due."""
    heartbeat = leases.heartbeat_of(store)
    eventually(lambda: 0 < heartbeat._wakes_at < math.inf)
    with heartbeat._condition:  # which the thread gives back when it sleeps
        assert heartbeat._wakes_at > 0


def test_shorter_lease_wakes_the_thread() -> None:
    """A lease that is due before the heartbeat would wake by itself is renewed in time."""
    store = Noted(str(uuid4()))
    with kept_alive(a_lease(store)):
        asleep(store)
        with kept_alive(a_lease(store, 0.3)):
            eventually(lambda: store.asked)
    assert set(store.asked) == {0.3}


def test_thread_ends_when_nothing_is_left() -> None:
    """When the thread wakes and finds no lease, it ends; the next lease starts another one."""
    store = Noted(str(uuid4()))
    for _ in range(2):
        with kept_alive(a_lease(store, 0.3)):
            assert running(store)
        eventually(lambda: not running(store))


def test_longest_duration_of_a_handler(caplog: pytest.LogCaptureFixture) -> None:
    """A retry takes over from a handler that hangs, which can no longer complete."""
    store = MemoryStore(str(uuid4()))
    operation = an_operation(lease=timedelta(seconds=0.3), max_duration=timedelta(seconds=1))
    stored = Payload(201, (), b"")
    successors: list[Outcome] = []

    def successor() -> bool:
        ran = engine.run(store, operation, lambda e: Result(e.attempt, stored), engine.reraise)
        successors.append(ran)
        return isinstance(ran, Executed)

    def hangs(_: object) -> Result:
        eventually(successor)
        return Result("late", stored)

    assert isinstance(engine.run(store, operation, hangs, engine.reraise), Replayed)
    assert successors[-1] == Executed(2)
    assert "max_duration" in caplog.text


def test_heartbeat_that_cannot_connect_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    """Where its connections cannot be opened, it says so, and renews the lease."""

    class Faulty(Noted):
        faults = 1

        @contextmanager
        def dedicated_connection(self, place: Hashable) -> Iterator[None]:
            faulty, self.faults = self.faults, 0
            if faulty:
                raise OperationalError("too many connections")
            with super().dedicated_connection(place):
                yield

    store = Faulty(str(uuid4()))
    with kept_alive(a_lease(store, 0.3)):
        eventually(lambda: store.asked)
    assert "The heartbeat could not open or close its connections." in caplog.text
    store.asked.clear()
    with kept_alive(a_lease(store, 0.3)):  # it goes on with the next lease
        eventually(lambda: store.asked)


THREADS = 4


@pytest.fixture
def pooled() -> Iterator[None]:
    """The default database has a pool: a connection for this thread and for THREADS others."""
    pytest.importorskip("psycopg_pool")
    if connection.vendor != "postgresql" or connection.Database.__name__ != "psycopg":
        pytest.skip("only psycopg 3 has a pool")
    settings = connections.settings["default"]
    usual = settings["OPTIONS"]
    connection.close()
    pool = {"min_size": 0, "max_size": THREADS + 1, "timeout": 1}
    settings["OPTIONS"] = {**usual, "pool": pool}
    try:
        yield
        connection.close()
    finally:
        connection.close_pool()
        settings["OPTIONS"] = usual


@pytest.mark.usefixtures("pooled")
def test_pool_without_a_connection_to_spare() -> None:
    """Owners that hold every connection of a pool are not taken over: one effect for each key."""
    store, contender = DatabaseStore(str(uuid4())), DatabaseStore(str(uuid4()))
    operations = [an_operation(lease=timedelta(seconds=3)) for _ in range(THREADS)]
    all_connected, go_on = threading.Barrier(THREADS + 1, timeout=PATIENCE), threading.Event()

    def execute(_: object) -> Result:
        Effect.objects.create(reference="a")  # on a connection that the thread keeps
        all_connected.wait()
        assert go_on.wait(PATIENCE)
        return Result(None, Payload(201, (), b""))

    def own(operation: Operation) -> Outcome:
        try:
            return engine.run(store, operation, execute, engine.reraise)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(THREADS) as threads:
        owners = [threads.submit(own, operation) for operation in operations]
        try:
            assert effects() <= THREADS  # this thread has its connection, too
            all_connected.wait()
            ends = _ends(operations)

            def renewed_or_taken_over() -> bool:
                for operation in operations:
                    if isinstance(contender.acquire(operation), Claim):
                        Effect.objects.create(reference="a")
                now = _ends(operations)
                return effects() > THREADS or all(now[key] > ends[key] for key in ends)

            eventually(renewed_or_taken_over)
        finally:
            go_on.set()
        outcomes = [owner.result(PATIENCE) for owner in owners]
    assert effects() == THREADS
    assert all(isinstance(outcome, Executed) for outcome in outcomes)


def _ends(operations: list[Operation]) -> dict[str, Any]:
    rows = IdempotencyKey.objects.filter(key__in=[operation.key for operation in operations])
    return dict(rows.values_list("key", "lease_expires_at"))


# Leases of the tenants of django-tenants, each of which has a schema of its own.


postgresql = pytest.mark.skipif(connection.vendor != "postgresql", reason="it alone has schemas")


@pytest.fixture
def tenants(monkeypatch: pytest.MonkeyPatch) -> Iterator[DatabaseStore]:
    """A store whose database the other threads reach by django-tenants, with two tenants."""
    pytest.importorskip("django_tenants")
    schemas = ("acme", "globex")
    tables = [IdempotencyKey._meta.db_table, IdempotencyStep._meta.db_table]
    with connection.cursor() as cursor:
        for schema in schemas:
            cursor.execute(f"CREATE SCHEMA {schema}")
            for table in tables:
                cursor.execute(f"CREATE TABLE {schema}.{table} (LIKE {table} INCLUDING ALL)")
    backend = "django_tenants.postgresql_backend"
    monkeypatch.setitem(connections.settings["default"], "ENGINE", backend)
    try:
        yield DatabaseStore(str(uuid4()))
    finally:
        with connection.cursor() as cursor:
            for schema in schemas:
                cursor.execute(f"DROP SCHEMA {schema} CASCADE")


def in_schema(schema: str, work: Callable[[], Any]) -> Any:
    """The result of some work for a tenant, as in its request."""
    connections["default"].set_schema(schema)  # type: ignore[attr-defined]
    try:
        return work()
    finally:
        connections["default"].close()


def attempted_by_thread(store: DatabaseStore, operation: Operation, handler: Any) -> Outcome:
    """An attempt of the async flow, whose claim is made in a thread."""
    return async_to_sync(aattempt)(store, operation, sync_to_async(handler))


@postgresql
@pytest.mark.parametrize("run", [attempt, attempted_by_thread])
def test_leases_are_renewed_where_they_were_made(tenants: DatabaseStore, run: Any) -> None:
    """A handler that outlives its lease runs once, at each of two tenants with the same key."""
    operation = an_operation(lease=timedelta(seconds=patience(1)))
    ran, both = [], threading.Barrier(2, timeout=PATIENCE)

    def handler(schema: str) -> str:
        ran.append(schema)
        both.wait()
        renewed = [lease_of(schema)]

        def later() -> bool:
            assert isinstance(attempt(tenants, operation, lambda _: ran.append(schema)), InProgress)
            renewed.append(lease_of(schema))
            return len(set(renewed)) > 4  # longer than the lease of the claim

        eventually(later)
        return schema

    def lease_of(schema: str) -> object:
        with connections["default"].cursor() as cursor:
            table = f"{schema}.{IdempotencyKey._meta.db_table}"
            cursor.execute(f"SELECT lease_expires_at FROM {table} WHERE key = %s", [operation.key])
            return cursor.fetchone()

    def work(schema: str) -> Outcome:
        def both_attempts() -> Outcome:
            first = run(tenants, operation, lambda _: handler(schema))
            assert isinstance(attempt(tenants, operation, lambda _: ran.append(schema)), Replayed)
            return first

        return in_schema(schema, both_attempts)

    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(work, ["acme", "globex"]))
    assert outcomes == [Executed("acme"), Executed("globex")]
    assert sorted(ran) == ["acme", "globex"]


@postgresql
def test_handler_that_looks_into_another_schema(tenants: DatabaseStore) -> None:
    """The response is stored where the claim was made, whatever cursors the handler has opened."""
    operation = an_operation()

    def handler(_: object) -> str:
        connections["default"].set_schema("globex")  # type: ignore[attr-defined]
        IdempotencyKey.objects.count()
        connections["default"].set_schema("acme")  # type: ignore[attr-defined]
        return "done"

    def twice() -> list[Outcome]:
        return [attempt(tenants, operation, handler) for _ in "ab"]

    with ThreadPoolExecutor(1) as thread:
        first, again = thread.submit(in_schema, "acme", twice).result()
        strays = thread.submit(in_schema, "globex", IdempotencyKey.objects.count).result()
    assert first == Executed("done")
    assert isinstance(again, Replayed)
    assert strays == 0
