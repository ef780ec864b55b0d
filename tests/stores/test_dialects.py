"""What the databases say of contention, provoked on the real ones."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from django.conf import settings
from django.db import OperationalError, connections, transaction

from idempotency_django.errors import OperationInProgress
from idempotency_django.stores import Store
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim, Operation, Record, Status
from idempotency_django.testing import RESPONSE, an_operation, in_threads

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

    @pytest.mark.parametrize(("is_mariadb", "tries"), [(True, 3), (False, 1)])
    def test_inserts(
        self, monkeypatch: pytest.MonkeyPatch, tries: int, *, is_mariadb: bool
    ) -> None:
        """An INSERT that a lock refuses is sent again, unless the server itself has waited."""
        store, sent = store_on("mariadb"), []

        def locked(execute: Any, sql: str, *rest: Any) -> Any:
            if "INSERT" in sql:
                sent.append(sql)
                raise OperationalError from Exception(1205)
            return execute(sql, *rest)

        connection: Any = connections[store.using]
        monkeypatch.setattr(connection, "mysql_is_mariadb", is_mariadb)
        with connection.execute_wrapper(locked), store.transaction():
            assert isinstance(store.acquire(an_operation()), Record)
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
