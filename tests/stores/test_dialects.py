"""What the databases do, provoked on the real ones: contention, snapshots, upper case."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from django.conf import settings
from django.db import OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from idempotency_django.engine import Result, reraise, run
from idempotency_django.errors import OperationInProgress
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import Store
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim, Operation, Record, Status
from idempotency_django.testing import RESPONSE, an_operation, in_threads
from tests.models import Effect
from tests.support.factories import IdempotencyKeyFactory
from tests.support.plans import rows_read

pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__"), pytest.mark.driver]


def store_on(name: str) -> DatabaseStore:
    """The store on a database that may not be there."""
    if name not in settings.ALIASES:
        pytest.skip(f"NO {name} HERE")
    return DatabaseStore("default", using=settings.ALIASES[name])


def acquired(store: Store, operation: Operation) -> Status | None:
    """Acquire in a transaction of its own; ``None`` stands for a claim."""
    with store.transaction():
        found = store.acquire(operation)
    return found.status if isinstance(found, Record) else None


class TestMariaDB:
    """There the row of a claim is the lock of its key."""

    def execute(self, store: DatabaseStore, operation: Operation) -> None:
        with store.transaction():
            claim = store.acquire(operation)
            assert isinstance(claim, Claim)
            assert store.complete(claim, RESPONSE)

    @pytest.mark.parametrize("rolls_back", [False, True])
    def test_within_a_transaction(self, rolls_back: bool) -> None:
        """An operation within a transaction excludes others until that ends, whatever becomes of
        its savepoint's neighbours; a duplicate is refused at once, however long others may wait.
        """
        store, operation = store_on("mariadb"), an_operation()

        def contend() -> Status | None:
            with connections[store.using].cursor() as cursor:
                cursor.execute("SET innodb_lock_wait_timeout = 1000")
            return acquired(store, operation)

        with transaction.atomic(using=store.using):
            self.execute(store, operation)
            with suppress(InterruptedError), store.transaction():
                assert isinstance(store.acquire(an_operation()), Claim)
                if rolls_back:
                    raise InterruptedError
            assert in_threads([contend]) == [Status.IN_PROGRESS]
        assert acquired(store, operation) is Status.COMPLETED

    @pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
    def test_lost_insert(self, level: str) -> None:
        """A duplicate that saw nothing, and whose INSERT is refused, looks again: it finds the
        response, even if the transaction has read before that was committed.
        """
        store, operation = store_on("mariadb"), an_operation()
        done: list[bool] = []

        def late(execute: Any, sql: str, *rest: Any) -> Any:
            if "INSERT" in sql and not done:
                done.append(True)
                in_threads([lambda: self.execute(store, operation)])
            return execute(sql, *rest)

        with connections[store.using].cursor() as cursor:
            cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        with connections[store.using].execute_wrapper(late):
            assert acquired(store, operation) is Status.COMPLETED
        assert done == [True]

    def test_other_keys(self) -> None:
        """Claims of one key lock no gap, in which others have to go: all of them are claimed."""
        store = store_on("mariadb")
        keys = [f"{number:03}" for number in range(40)]

        def execute(number: int) -> list[Status | None]:
            with connections[store.using].cursor() as cursor:
                cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            mine = [an_operation(key=key) for key in keys[number::4]]
            shared = an_operation(key="020-shared")
            found = []
            for operation in mine:
                acquired(store, shared)  # claims it, or is refused, and rolls back or not
                with store.transaction():
                    one = store.acquire(operation)
                    if isinstance(one, Claim):
                        assert store.complete(one, RESPONSE)
                    found.append(one.status if isinstance(one, Record) else None)
            return found

        found = in_threads([partial(execute, number) for number in range(4)])
        assert [status for each in found for status in each] == [None] * 40

    @pytest.mark.parametrize("code", [1205, 1467])  # the latter: of the table's numbers
    @pytest.mark.parametrize(("is_mariadb", "tries"), [(True, 3), (False, 1)])
    def test_inserts(
        self, monkeypatch: pytest.MonkeyPatch, code: int, tries: int, *, is_mariadb: bool
    ) -> None:
        """An INSERT that a lock refuses is sent again, unless the server itself has waited; then it
        is in progress.
        """
        store, sent = store_on("mariadb"), []

        def locked(execute: Any, sql: str, *rest: Any) -> Any:
            if "INSERT" in sql:
                sent.append(sql)
                raise OperationalError from Exception(code)
            return execute(sql, *rest)

        connection: Any = connections[store.using]
        monkeypatch.setattr(connection, "mysql_is_mariadb", is_mariadb)
        with connection.execute_wrapper(locked), store.transaction():
            found = store.acquire(an_operation())
        assert isinstance(found, Record)
        assert found.status is Status.IN_PROGRESS
        assert len(sent) == tries

    def test_deadlock_is_no_duplicate(self) -> None:
        """It has rolled back everything, and says so to whatever surrounds the claim."""
        store, operation = store_on("mariadb"), an_operation()

        def deadlock(execute: Any, sql: str, *rest: Any) -> Any:
            if "INSERT" in sql:
                raise OperationalError from Exception(1213)
            return execute(sql, *rest)

        with (
            connections[store.using].execute_wrapper(deadlock),
            pytest.raises(OperationInProgress),
            store.transaction(),
        ):
            store.acquire(operation)


def test_replay_of_what_is_gone() -> None:
    """A replay of a record that was purged meanwhile is not counted anywhere."""
    MemoryStore("memory").record_replay(
        Record(key="k", scope="s", status=Status.COMPLETED), an_operation()
    )


def stored() -> Operation:
    """An operation that another connection has executed and completed."""
    operation = an_operation(count_replays=False)

    def execute() -> None:
        store = DatabaseStore("default")
        with transaction.atomic():
            claim = store.acquire(operation)
            assert isinstance(claim, Claim)
            store.complete(claim, RESPONSE)

    in_threads([execute])
    return operation


@pytest.mark.postgres
@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="needs PostgreSQL")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("last", [True, False])
def test_record_that_a_snapshot_does_not_show(level: str, last: bool) -> None:
    """A transaction that has read before the first request committed does not see its record.

    It runs, cannot store its response, and is told "in progress": it has rolled back. The next
    transaction finds the response.
    """
    store = DatabaseStore("default")
    with pytest.raises(OperationInProgress, match="has rolled back"), store.transaction():
        with connection.cursor() as cursor:
            cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        assert Effect.objects.count() == 0  # from here on it sees what was committed before
        operation = stored()
        claim = store.acquire(operation)
        assert isinstance(claim, Claim)
        Effect.objects.create(reference="a")
        store.complete(claim, RESPONSE, last=last)
    assert Effect.objects.count() == 0
    with transaction.atomic():
        found = store.acquire(operation)
    assert isinstance(found, Record)
    assert found.status is Status.COMPLETED


@pytest.mark.postgres
@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="needs PostgreSQL")
def test_state_of_what_a_snapshot_does_not_show() -> None:
    """Nobody is told that nothing was executed: another request has executed it."""

    def effect(_: object) -> Result:
        Effect.objects.create(reference="a")
        return Result("response", RESPONSE)

    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert Effect.objects.count() == 0
        operation = stored()
        with pytest.raises(OperationInProgress) as refused:
            run(DatabaseStore("default"), operation, effect, reraise)
    assert refused.value.state == "in-progress"


@pytest.mark.skipif("postgres" not in settings.ALIASES, reason="the plans are PostgreSQL's")
def test_busy_scope_that_is_new() -> None:
    """A record is found by its key, however many others are in a scope that no statistics know."""
    using, operation = settings.ALIASES["postgres"], an_operation()
    store, rows = DatabaseStore("default", using=using), IdempotencyKey.objects.using(using)
    rows.bulk_create(IdempotencyKeyFactory.build_batch(200, scope="known"))
    with connections[using].cursor() as cursor:
        cursor.execute(f"ANALYZE {IdempotencyKey._meta.db_table}")
    rows.bulk_create(IdempotencyKeyFactory.build_batch(200, scope=operation.scope))
    rows.filter(scope=operation.scope).update(fingerprint=operation.fingerprint)
    key = rows.filter(scope=operation.scope).values_list("key", flat=True)[100]
    with transaction.atomic(using=using), CaptureQueriesContext(connections[using]) as queries:
        assert isinstance(store.acquire(replace(operation, key=key)), Record)
        assert store.get(key, operation.scope)
    *_, looked = [query["sql"] for query in queries]
    assert looked.startswith("SELECT")
    assert rows_read(using, looked) == 1
