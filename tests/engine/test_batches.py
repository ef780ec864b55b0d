"""What a batch costs on PostgreSQL: as many statements for a hundred operations as for one."""

from __future__ import annotations

from typing import Any

import pytest
from django.conf import settings
from django.db import connections
from django.test.utils import CaptureQueriesContext

from idempotency_django.models import IdempotencyKey
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import Claim, Operation, Record
from idempotency_django.testing import MOMENT, RESPONSE, an_operation, in_threads
from tests.support.plans import nodes

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.skipif("postgres" not in settings.ALIASES, reason="the budgets are PostgreSQL's"),
    pytest.mark.driver,
]


@pytest.fixture
def store() -> DatabaseStore:
    return DatabaseStore("default", using=settings.ALIASES["postgres"])


def several(count: int = 100, **changes: Any) -> list[Operation]:
    return [an_operation(**changes) for _ in range(count)]


def claims(found: Any) -> list[Claim]:
    return [one for one in found if isinstance(one, Claim)]


def words(queries: CaptureQueriesContext) -> list[str]:
    """The first word of each statement within the transaction."""
    first = [query["sql"].removeprefix("BEGIN; ").split()[0] for query in queries]
    return [word for word in first if word not in ("BEGIN", "COMMIT")]


def run(store: DatabaseStore, operations: list[Operation]) -> list[str]:
    """Execute what of the batch is new, and return the statements of it."""
    with CaptureQueriesContext(connections[store.using]) as queries, store.transaction():
        mine = claims(store.acquire_many(operations))
        store.complete_many([(claim, RESPONSE) for claim in mine])
    return words(queries)


@pytest.mark.parametrize("combines", [True, False])
def test_statements(store: DatabaseStore, combines: bool) -> None:
    """One look at all keys, locks first, and one INSERT of what is new."""
    store.combine_statements = combines
    as_one = combines and hasattr(connections[store.using].Database, "ClientCursor")
    look = ["SELECT"] if as_one else ["SELECT"] * 2
    operations = several()
    assert run(store, operations) == [*look, "INSERT"]
    assert run(store, operations) == look
    assert run(store, [*several(50), *operations[:50]]) == [*look, "INSERT"]


def test_busy_keys(store: DatabaseStore) -> None:
    """While one batch is being executed, another one gets what is left of it, at once."""
    operations = several(20)
    with store.transaction():
        assert len(claims(store.acquire_many(operations[:15]))) == 15

        def other() -> list[bool]:
            with store.transaction():
                return [isinstance(one, Claim) for one in store.acquire_many(operations)]

        [got] = in_threads([other])
        assert got == [False] * 15 + [True] * 5


@pytest.mark.parametrize("analyzed", [True, False])
def test_plans(store: DatabaseStore, analyzed: bool) -> None:
    """Rows are found by their indexes, also if the statistics say that the table is empty."""
    table, connection = IdempotencyKey._meta.db_table, connections[store.using]
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM ANALYZE {table}")
    for _ in range(10):
        run(store, several(500, ttl=MOMENT * 10**7))
    if analyzed:
        with connection.cursor() as cursor:
            cursor.execute(f"VACUUM ANALYZE {table}")
    operations = several(20)
    run(store, operations)
    store._dialect.combine = False
    with CaptureQueriesContext(connection) as queries, store.transaction():
        found = store.acquire_many([*operations, *several(20)])
        store.complete_many([(claim, RESPONSE) for claim in claims(found)])
    locked, looked = [q["sql"] for q in queries if q["sql"].startswith("SELECT")]
    assert "lock" in locked
    assert "Seq Scan" not in {node["Node Type"] for node in nodes(store.using, looked)}
    assert sum(isinstance(one, Record) for one in found) == 20
