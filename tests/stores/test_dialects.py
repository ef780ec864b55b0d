"""What the databases say of contention, provoked on the real ones."""

from __future__ import annotations

import sqlite3
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import OperationalError, connections, transaction
from django.test import override_settings

from idempotency_django.errors import OperationInProgress, StoreUnavailable
from idempotency_django.stores import Store
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim, Operation, Record, Status
from idempotency_django.testing import RESPONSE, an_operation, eventually, in_threads

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
    """Inside a transaction of the caller's the named lock ends before the row does."""

    def execute(self, store: DatabaseStore, operation: Operation) -> None:
        with store.transaction():
            claim = store.acquire(operation)
            assert isinstance(claim, Claim)
            assert store.complete(claim, RESPONSE)

    def test_wait_is_bounded(self) -> None:
        """A duplicate waits for the row as long as the server lets it, and is told."""
        store, operation = store_on("mariadb"), an_operation()

        def contend() -> Status | None:
            with connections[store.using].cursor() as cursor:
                cursor.execute("SET innodb_lock_wait_timeout = 1")
            return acquired(store, operation)

        with transaction.atomic(using=store.using):
            self.execute(store, operation)
            assert in_threads([contend]) == [Status.IN_PROGRESS]
        assert acquired(store, operation) is Status.COMPLETED

    def test_lost_insert(self) -> None:
        """A duplicate that waited for the row finds it completed."""
        store, operation = store_on("mariadb"), an_operation()

        def execute_once_the_other_waits() -> None:
            def somebody_waits() -> bool:
                with connections[store.using].cursor() as cursor:
                    cursor.execute(
                        "SELECT count(*) FROM information_schema.processlist "
                        "WHERE info LIKE 'INSERT INTO%' AND id <> connection_id()"
                    )
                    return bool(cursor.fetchone()[0])

            with transaction.atomic(using=store.using):
                self.execute(store, operation)
                done.append(True)
                eventually(somebody_waits)

        def contend() -> Status | None:
            eventually(lambda: done)
            return acquired(store, operation)

        done: list[bool] = []
        assert in_threads([execute_once_the_other_waits, contend]) == [None, Status.COMPLETED]

    def test_other_fault(self) -> None:
        """Any other fault of the server is no contention."""
        store = store_on("mariadb")

        def fail(execute: Any, sql: str, *rest: Any) -> Any:
            if sql.startswith("INSERT"):
                raise OperationalError from Exception(1041)  # out of memory
            return execute(sql, *rest)

        with (
            connections[store.using].execute_wrapper(fail),
            pytest.raises(StoreUnavailable),
            store.transaction(),
        ):
            store.acquire(an_operation())

    def test_lost_connection(self) -> None:
        """A session that is gone has no locks to release."""
        store, operation = store_on("mariadb"), an_operation()

        def kill(session: int) -> None:
            with connections[store.using].cursor() as cursor:
                cursor.execute(f"KILL {session}")

        with pytest.raises(StoreUnavailable), store.transaction():
            store.acquire(operation)
            session = connections[store.using].connection.thread_id()
            in_threads([lambda: kill(session)])
        connections[store.using].close()
        assert acquired(store, operation) is None


def test_sqlite_is_busy() -> None:
    """A write lock that cannot be had in time says: in progress."""
    store = store_on("sqlite")
    connection = connections[store.using]
    connection.ensure_connection()
    other = sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)
    try:
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout = 1")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OperationInProgress), store.transaction():
            pass
    finally:
        other.close()
        connection.close()


class Least(MemoryStore):
    """A store that leaves to the contract all that it can."""

    purgeable = Store.purgeable


def test_defaults_of_the_contract() -> None:
    """A store that expires by itself has nothing to purge, and nothing wrong with it."""
    store = Least("least")
    assert store.purgeable(timedelta(0)) == 0
    with override_settings(DEBUG=True):  # else it warns of a store in memory
        assert list(store.check()) == []
    assert list(store.check_live()) == []
    assert store.using is None


def test_replay_of_what_is_gone() -> None:
    """A replay of a record that was purged meanwhile is not counted anywhere."""
    MemoryStore("memory").record_replay(
        Record(key="k", scope="s", status=Status.COMPLETED), an_operation()
    )


def test_permanent_record_is_extended() -> None:
    """A permanent record stays one, counted or not."""
    store = DatabaseStore("default")
    for counts in (True, False):
        operation = an_operation(ttl=None, extend_on_replay=True, count_replays=counts)
        with store.transaction():
            claim = store.acquire(operation)
            assert isinstance(claim, Claim)
            store.complete(claim, RESPONSE)
        with store.transaction():
            found = store.acquire(operation)
            assert isinstance(found, Record)
            store.record_replay(found, operation)
        assert acquired(store, operation) is Status.COMPLETED
