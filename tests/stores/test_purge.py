"""The purge of a database store, on every database, alone and under traffic."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import connections, transaction
from django.db.models.signals import post_delete
from django.test.utils import CaptureQueriesContext

from idempotency_django import engine
from idempotency_django.models import IdempotencyKey, IdempotencyKeyQuerySet, IdempotencyStep
from idempotency_django.stores import purging, stores
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim, Status
from idempotency_django.testing import PATIENCE, RESPONSE, an_operation, in_threads
from tests.models import Effect
from tests.support.factories import ago, copies, record, records
from tests.support.nightly import few
from tests.support.plans import nodes

ALIASES = list(settings.ALIASES.values())
pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__"), pytest.mark.driver]
each_database = pytest.mark.parametrize("alias", ALIASES, ids=list(settings.ALIASES))


def rows(alias: str) -> IdempotencyKeyQuerySet:
    """The records of a database."""
    return IdempotencyKeyQuerySet(IdempotencyKey, using=alias)


def purged(alias: str, *, older_than: timedelta = timedelta(0), batch_size: int = 5000) -> int:
    """How many records one batch takes."""
    return DatabaseStore("default", using=alias).purge(older_than, batch_size)


def left(alias: str) -> set[str]:
    """The keys that have a record."""
    return set(rows(alias).values_list("key", flat=True))


@each_database
class TestWhatGoes:
    """What one purge deletes, and what it spares."""

    def test_states(self, alias: str) -> None:
        """What failed, completed or was abandoned goes, if it is not retained nor in use."""
        ended = {"purgeable": True}
        record(alias, key="failed", failed=True, **ended)
        record(alias, key="tombstone", tombstone=True, **ended)
        leases = {"abandoned": (1, False), "held": (1, True), "running": (-1, False)}
        for key, (days, hold) in leases.items():
            lease = {"lease_expires_at": ago(days=days), "hold": hold}
            record(alias, key=key, status="in_progress", **ended, **lease)
        record(alias, key="replayed")
        for trait in ("expired", "permanent"):
            record(alias, key=trait, **{trait: True})
        assert purged(alias) == 3
        assert left(alias) == {"held", "running", "replayed", "expired", "permanent"}

    def test_one_statement(self, alias: str) -> None:
        """A batch is few statements, whoever listens to deletions: no record is loaded."""
        records(3, alias, purgeable=True)
        heard: list[object] = []

        def hear(instance: object, **_: object) -> None:
            heard.append(instance)

        post_delete.connect(hear)
        try:
            with CaptureQueriesContext(connections[alias]) as queries:
                assert purged(alias) == 3
        finally:
            post_delete.disconnect(hear)
        assert heard == []
        statements = [query["sql"].split()[0] for query in queries]
        level = ["SET"] if connections[alias].vendor == "mysql" else []
        expected = [*level, "SELECT", "DELETE", "DELETE"]
        assert [word for word in statements if word not in ("BEGIN", "COMMIT")] == expected


STATES: list[dict[str, Any]] = [
    {},
    {"failed": True},
    {"tombstone": True},
    {"permanent": True},
    {"in_progress": True},
    {"interrupted": True},
    {"held": True},
]


@each_database
def test_purge_takes_what_is_purgeable(alias: str) -> None:
    """The SQL of the purge and the queryset of operators are of one mind, on every record."""
    for days in (None, -1, 1, 3):
        for state in STATES:
            ends = {} if days is None else {"purge_at": ago(days=days)}
            record(alias, **{**state, **ends})
    store, rows = DatabaseStore("default", using=alias), IdempotencyKeyQuerySet(IdempotencyKey)
    older_than = timedelta(days=2)
    for age in (older_than, timedelta(0)):
        every = set(rows.using(alias).values_list("pk", flat=True))
        gone = set(rows.using(alias).purgeable(age).values_list("pk", flat=True))
        assert 0 < len(gone) < len(every)
        assert store.purge(age, 1000) == len(gone)
        assert set(rows.using(alias).values_list("pk", flat=True)) == every - gone
    assert connections[alias].in_atomic_block is False


def with_steps(made: list[IdempotencyKey], alias: str) -> None:
    """Give each record two steps."""
    steps = [
        IdempotencyStep(
            record=one,
            name=f"step {number}",
            attempt=1,
            result="null",
            completed_at=one.created_at,
        )
        for one in made
        for number in range(2)
    ]
    IdempotencyStep.objects.using(alias).bulk_create(steps)


@contextmanager
def held(alias: str, key: str, within: Any = None) -> Iterator[None]:
    """Another transaction holds the record, or the rows that are given instead."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with transaction.atomic(using=alias):
                found = rows(alias).filter(key=key) if within is None else within
                assert list(found.select_for_update())
                taken.set()
                assert done.wait(PATIENCE)
        finally:
            connections[alias].close()

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert taken.wait(PATIENCE)
        yield
    finally:
        done.set()
        holder.join()


@each_database
def test_held_record_is_left(alias: str) -> None:
    """A record that another transaction holds is skipped, and not waited for."""
    if not connections[alias].features.has_select_for_update_skip_locked:
        pytest.skip("SQLite has no locks on rows")
    record(alias, purgeable=True, key="held", expires_at=ago(days=2))
    record(alias, purgeable=True, key="free", expires_at=ago(days=1))
    with held(alias, "held"):
        # Were it waited for, the transaction that holds it could never end.
        assert purged(alias) == 1
        assert left(alias) == {"held"}
    assert purged(alias) == 1


def drain(alias: str, batch_size: int) -> int:
    """Purge to the end, and return how many records went."""
    store = DatabaseStore("default", using=alias)
    return sum(iter(lambda: store.purge(timedelta(0), batch_size), 0))


@each_database
def test_purges_at_once(alias: str) -> None:
    """Each record is purged, and counted, by one of two purges."""
    records(600, alias, purgeable=True)
    records(20, alias)
    counts = in_threads([lambda: drain(alias, 20)] * 2)
    # Each stops when what is left is held by the other; the rest goes with the next purge.
    assert sum(counts) + drain(alias, 20) == 600
    assert rows(alias).count() == 20


@each_database
def test_purge_under_traffic(alias: str) -> None:
    """What is claimed, taken over or replayed while a purge runs has one effect and one record.

    Each key has an expired record, which the purge and two clients compete for: whoever is first,
    the operation is executed once, and its new record stays.
    """
    keys = [f"key-{number}" for number in range(60)]
    patience = timedelta(seconds=PATIENCE)
    operations = [an_operation(key=key, wait=patience) for key in keys]
    for operation in operations:
        traits = {"key": operation.key, "scope": operation.scope}
        record(alias, purgeable=True, fingerprint=operation.fingerprint, **traits)
    records(300, alias, purgeable=True)
    store, stop = DatabaseStore("default", using=alias), threading.Event()

    def execute(execution: Any) -> engine.Result:
        Effect.objects.using(alias).create(reference=execution.key)
        return engine.Result(None, RESPONSE)

    def client() -> list[engine.Outcome]:
        try:
            return [engine.run(store, each, execute, engine.reraise) for each in operations]
        finally:
            stop.set()

    def purger() -> int:
        count = 0
        while not stop.is_set():
            count += purged(alias, batch_size=7)
        return count + drain(alias, 7)

    first, second, _ = in_threads([client, client, purger])
    executed = [isinstance(outcome, engine.Executed) for outcome in (*first, *second)]
    assert sum(executed) == len(keys)
    assert Effect.objects.using(alias).count() == len(keys)
    assert left(alias) == set(keys)
    assert set(rows(alias).values_list("status", flat=True)) == {Status.COMPLETED}


@pytest.mark.skipif("postgres" not in settings.ALIASES, reason="the plan is PostgreSQL's")
@pytest.mark.parametrize("analyzed", few([False, True]))
def test_plan(analyzed: bool) -> None:
    """PostgreSQL finds a batch by the index, chooses it once and reads no other rows.

    That holds for a table whose statistics are out of date, too: they say that it is empty.
    """
    alias = settings.ALIASES["postgres"]
    connection, batch = connections[alias], 50
    with connection.cursor() as cursor:
        table = IdempotencyKey._meta.db_table
        cursor.execute(f"VACUUM ANALYZE {table}")
        cursor.execute(f"VACUUM ANALYZE {IdempotencyStep._meta.db_table}")
        with_steps(copies(4000, record(alias, purgeable=True)), alias)
        with_steps(copies(1000, record(alias)), alias)
        if analyzed:
            cursor.execute(f"VACUUM ANALYZE {table}")
            cursor.execute(f"VACUUM ANALYZE {IdempotencyStep._meta.db_table}")
        with transaction.atomic(using=alias), CaptureQueriesContext(connection) as queries:
            purged(alias, batch_size=batch)
            transaction.set_rollback(True, using=alias)
    statements = [q["sql"] for q in queries if q["sql"].startswith(("SELECT", "DELETE"))]
    steps = [node for statement in statements for node in nodes(alias, statement)]
    assert all(step["Actual Loops"] == 1 for step in steps)
    assert {step["Index Name"] for step in steps if "Index Name" in step} == {
        "idempotency_purge_at_idx",
        "idempotency_django_idempotencykey_pkey",
        "idempotency_step_record_idx",
    }
    assert all(step["Actual Rows"] <= 2 * batch for step in steps)  # a record's two steps


class Endless(MemoryStore):
    """A store in which something becomes purgeable all the time."""

    def __init__(self) -> None:
        super().__init__("endless")
        self.asked: list[timedelta] = []

    def purge(self, older_than: timedelta, limit: int) -> int:
        self.asked.append(older_than)
        assert len(self.asked) < 100, "The purge went on and on."
        return limit


class TestLoop:
    """``purge()`` of all stores, batch by batch."""

    def test_all_stores(self, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each store is purged to its end, then what is registered, and each batch is told."""
        path = "idempotency_django.stores.database.DatabaseStore"
        configured = {each: {"BACKEND": path, "OPTIONS": {"using": each}} for each in ALIASES}
        settings.IDEMPOTENCY = {"STORES": configured}
        batches = iter([1, 0])
        monkeypatch.setattr(purging, "_registered", [lambda *_: next(batches)])
        for alias in ALIASES:
            records(5, alias, purgeable=True)
        assert list(purging.purge(batch_size=2)) == [*[2, 2, 1] * len(ALIASES), 1]

    def test_what_becomes_purgeable_meanwhile_is_left(
        self, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The limit stays at the moment when the purge began, so that it comes to an end."""
        settings.IDEMPOTENCY, store = {}, Endless()
        monkeypatch.setitem(stores.made, "default", store)
        batches = purging.purge()
        for _ in range(3):
            next(batches)
        assert store.asked == sorted(set(store.asked))

    def test_batch_size(self) -> None:
        """A batch of nothing is refused: it would look like a store without anything to purge."""
        with pytest.raises(ValueError, match="at least 1, not 0"):
            next(purging.purge(batch_size=0))


@pytest.mark.skipif("mariadb" not in settings.ALIASES, reason="MariaDB locks gaps")
def test_new_keys_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A purge locks no gap that a new key goes into, whatever the isolation level is."""
    alias = settings.ALIASES["mariadb"]
    store = DatabaseStore("default", using=alias)
    for _ in range(5):
        record(alias, purge_at=ago(days=1))
    execute, found = store._dialect.execute, []

    def claim() -> bool:
        with store.transaction():
            return isinstance(store.acquire(an_operation()), Claim)

    def purge_slowly(sql: str, *given: Any) -> int:
        deleted = execute(sql, *given)
        if sql == store._dialect.sql["purge"]:
            found.extend(in_threads([claim]))
        return deleted

    monkeypatch.setattr(store._dialect, "execute", purge_slowly)
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert store.purge(timedelta(0), 10) == 5
    finally:
        connections[alias].close()
    assert found == [True]
