"""Leases of the tenants of django-tenants, each of which has a schema of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, connections

from idempotency_django import engine
from idempotency_django.engine import Executed, InProgress, Outcome, Replayed, Result
from idempotency_django.models import IdempotencyKey, IdempotencyStep
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import Operation, Payload
from idempotency_django.testing import PATIENCE, an_operation, eventually
from tests.support.machine import patience

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="only PostgreSQL has schemas"),
]

STORED = Payload(201, (), b"done")


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


def attempt(store: DatabaseStore, operation: Operation, handler: Callable[[], object]) -> Outcome:
    return engine.run(store, operation, lambda _: Result(handler(), STORED), engine.reraise)


def aattempt(store: DatabaseStore, operation: Operation, handler: Callable[[], object]) -> Outcome:
    """The same by the async flow, whose claim is made in a thread."""

    async def execute(_: object) -> Result:
        return Result(await sync_to_async(handler)(), STORED)

    return async_to_sync(engine.arun)(store, operation, execute, engine.reraise)


@pytest.mark.parametrize("run", [attempt, aattempt])
def test_leases_are_renewed_where_they_were_made(tenants: DatabaseStore, run: Any) -> None:
    """A handler that outlives its lease runs once, at each of two tenants with the same key."""
    operation = an_operation(lease=timedelta(seconds=patience(1)))
    ran, both = [], threading.Barrier(2, timeout=PATIENCE)

    def handler(schema: str) -> str:
        ran.append(schema)
        both.wait()
        renewed = [lease_of(schema)]

        def later() -> bool:
            assert isinstance(attempt(tenants, operation, lambda: ran.append(schema)), InProgress)
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
            first = run(tenants, operation, lambda: handler(schema))
            assert isinstance(attempt(tenants, operation, lambda: ran.append(schema)), Replayed)
            return first

        return in_schema(schema, both_attempts)

    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(work, ["acme", "globex"]))
    assert outcomes == [Executed("acme"), Executed("globex")]
    assert sorted(ran) == ["acme", "globex"]


def test_handler_that_looks_into_another_schema(tenants: DatabaseStore) -> None:
    """The response is stored where the claim was made, whatever cursors the handler has opened."""
    operation = an_operation()

    def handler() -> str:
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
