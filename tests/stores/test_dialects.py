"""What the databases do, provoked on the real ones: contention, snapshots, upper case."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.conf import settings
from django.db import OperationalError, connection, connections, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import path

from idempotency_django.decorators import idempotent
from idempotency_django.engine import Result, reraise, run
from idempotency_django.errors import OperationInProgress, StoreUnavailable
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import Store
from idempotency_django.stores.database import DIALECTS, DatabaseStore
from idempotency_django.stores.records import Claim, Operation, Record, Status
from idempotency_django.testing import MOMENT, RESPONSE, an_operation, in_threads
from idempotency_django.testing.contract import as_claim, as_record
from tests.models import Effect
from tests.support.factories import IdempotencyKeyFactory
from tests.support.plans import nodes, rows_read
from tests.support.shared import assert_problem, assert_replays, completed, effects, new_key, post
from tests.support.views import Mixed, create

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.urls(__name__),
    pytest.mark.driver,
]


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
            claim = as_claim(store.acquire(operation))
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
            found = as_record(store.acquire(an_operation()))
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


def stored() -> Operation:
    """An operation that another connection has executed and completed."""
    [operation] = in_threads([lambda: completed(DatabaseStore("default"), count_replays=False)])
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
        claim = as_claim(store.acquire(operation))
        Effect.objects.create(reference="a")
        store.complete(claim, RESPONSE, last=last)
    assert Effect.objects.count() == 0
    with transaction.atomic():
        found = as_record(store.acquire(operation))
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


# What a batch costs on PostgreSQL: as many statements for a hundred operations as for one.


on_postgresql = pytest.mark.skipif(
    "postgres" not in settings.ALIASES, reason="the plans are PostgreSQL's"
)


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


def run_batch(store: DatabaseStore, operations: list[Operation]) -> list[str]:
    """Execute what of the batch is new, and return the statements of it."""
    with CaptureQueriesContext(connections[store.using]) as queries, store.transaction():
        mine = claims(store.acquire_many(operations))
        store.complete_many([(claim, RESPONSE) for claim in mine])
    return words(queries)


@on_postgresql
@pytest.mark.parametrize("combines", [True, False])
def test_statements(store: DatabaseStore, combines: bool) -> None:
    """One look at all keys, locks first, and one INSERT of what is new."""
    store.combine_statements = combines
    as_one = combines and hasattr(connections[store.using].Database, "ClientCursor")
    look = ["SELECT"] if as_one else ["SELECT"] * 2
    operations = several()
    assert run_batch(store, operations) == [*look, "INSERT"]
    assert run_batch(store, operations) == look
    assert run_batch(store, [*several(50), *operations[:50]]) == [*look, "INSERT"]


@on_postgresql
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


@on_postgresql
@pytest.mark.parametrize("analyzed", [True, False])
def test_plans(store: DatabaseStore, analyzed: bool) -> None:
    """Rows are found by their indexes, also if the statistics say that the table is empty."""
    table, connection = IdempotencyKey._meta.db_table, connections[store.using]
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM ANALYZE {table}")
    for _ in range(10):
        run_batch(store, several(500, ttl=MOMENT * 10**7))
    if analyzed:
        with connection.cursor() as cursor:
            cursor.execute(f"VACUUM ANALYZE {table}")
    operations = several(20)
    run_batch(store, operations)
    store._dialect.combine = False
    with CaptureQueriesContext(connection) as queries, store.transaction():
        found = store.acquire_many([*operations, *several(20)])
        store.complete_many([(claim, RESPONSE) for claim in claims(found)])
    locked, looked = [q["sql"] for q in queries if q["sql"].startswith("SELECT")]
    assert "lock" in locked
    assert "Seq Scan" not in {node["Node Type"] for node in nodes(store.using, looked)}
    assert sum(isinstance(one, Record) for one in found) == 20


# SQLite, whose one write lock somebody else holds for too long: who is told what.


on_sqlite = pytest.mark.skipif("sqlite" not in settings.ALIASES, reason="the lock is SQLite's")
USING = settings.ALIASES.get("sqlite", "")

urlpatterns = [
    path("view/", idempotent(create)),
    path("drf/", Mixed.as_view()),
    path("leased/", idempotent(mode="leased")(create)),
    path("accepted/", idempotent(mode="leased", on_conflict="accepted")(create)),
]


@pytest.fixture
def impatient() -> Iterator[DatabaseStore]:
    """A store that waits for the lock for a moment only."""
    connections[USING].close()
    options = connections[USING].settings_dict["OPTIONS"]
    timeout, options["timeout"] = options["timeout"], 0.05
    yield DatabaseStore("default", using=USING)
    connections[USING].close()
    options["timeout"] = timeout


@contextmanager
def locked() -> Iterator[None]:
    """Somebody else writes, for the length of the block."""
    name = connections[USING].settings_dict["NAME"]
    holder = sqlite3.connect(name, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        holder.close()


@on_sqlite
@pytest.mark.parametrize("kind", ["step", "fence", "handler"])
def test_transaction_that_cannot_begin(impatient: DatabaseStore, kind: str) -> None:
    """So is whatever a claim's owner begins: a step, a fenced or its handler's transaction."""
    claim = as_claim(impatient.acquire(an_operation(lease=timedelta(seconds=30))))
    begins = {
        "step": impatient.durable("It"),
        "fence": impatient.fenced(claim),
        "handler": impatient.transaction(),
    }[kind]
    with locked(), pytest.raises(OperationInProgress), begins:
        pytest.fail("It began.")
    with impatient.durable("It"):
        pass


@on_sqlite
@pytest.mark.parametrize("kind", ["request", "step", "fence"])
def test_transaction_that_cannot_end(impatient: DatabaseStore, kind: str) -> None:
    """At COMMIT, where a reader is in the way, nobody says that nothing was executed; but what
    is one transaction as a whole is said to have rolled back.
    """
    refused, told = {
        "request": (OperationInProgress, "could not commit.* has rolled back"),
        "step": (StoreUnavailable, "so the result is unknown"),
        "fence": (StoreUnavailable, "so the result is unknown"),
    }[kind]
    operation = an_operation(lease=None if kind == "request" else timedelta(seconds=30))
    reader = sqlite3.connect(connections[USING].settings_dict["NAME"])
    with closing(reader), pytest.raises(refused, match=told), ExitStack() as stack:
        if kind == "request":
            stack.enter_context(impatient.transaction())
            found = impatient.acquire(operation)
        else:
            found = as_claim(impatient.acquire(operation))
            begun = impatient.durable("It") if kind == "step" else impatient.fenced(found)
            stack.enter_context(begun)
        assert isinstance(found, Claim)
        Effect.objects.using(USING).create(reference="a")
        reader.execute("BEGIN")
        reader.execute("SELECT 1 FROM django_migrations").fetchone()
    assert not Effect.objects.using(USING).exists()


@on_sqlite
def test_attempt_that_cannot_commit(impatient: DatabaseStore) -> None:
    """An attempt that is refused at COMMIT has failed as any other: the record says so."""
    operation = an_operation()
    reader = sqlite3.connect(connections[USING].settings_dict["NAME"])

    def execute(execution: Any) -> Result:
        Effect.objects.using(USING).create(reference="a")
        reader.execute("BEGIN")
        reader.execute("SELECT 1 FROM django_migrations").fetchone()
        return Result("response", RESPONSE)

    def recover(error: Exception) -> Result:
        reader.close()  # it is away when the failure is written down
        raise error

    with closing(reader), pytest.raises(OperationInProgress, match="has rolled back") as caught:
        run(impatient, operation, execute, recover)
    assert (caught.value.state, caught.value.safe_new_key) == ("not-executed", False)
    row = IdempotencyKey.objects.using(USING).get()
    assert (row.status, row.attempt) == (Status.FAILED, 1)
    assert not Effect.objects.using(USING).exists()


@on_sqlite
def test_shared_memory_is_busy() -> None:
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


def assert_busy(response: Any) -> None:
    """The database is to blame, and not the key."""
    problem = assert_problem(response, 503, "store-unavailable")
    assert problem["detail"].startswith("Another transaction has locked the database")
    assert int(response["Retry-After"]) > 0


@on_sqlite
@pytest.mark.skipif(connection.vendor != "sqlite", reason="the views write to the default database")
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("url", ["/view/", "/drf/", "/leased/", "/accepted/"])
def test_new_key(client: Client, url: str) -> None:
    """A request with a new key is told that the database is busy, and runs at the next try."""
    key = new_key()
    with locked():
        for _ in "ab":
            assert_busy(post(client, url, key))
    assert effects() == 0
    first = post(client, url, key)
    assert first.status_code == 201
    assert_replays(first, post(client, url, key))
