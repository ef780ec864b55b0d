"""The timeline that a cached answer is bound to: who is asked, how often, and what if not."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.core.cache import caches
from django.db import OperationalError, ProgrammingError, connections, transaction
from django.test.utils import CaptureQueriesContext

from idempotency_django.contrib.cached import CachedStore
from idempotency_django.errors import StoreUnavailable
from idempotency_django.stores.database.dialects.statements import templates
from idempotency_django.stores.records import Record
from idempotency_django.testing import ANSWER
from tests.support import completed

EPOCH_QUERIES = {vendor: templates(vendor)["failover_epoch"] for vendor in ("postgresql", "mysql")}

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


@pytest.fixture(autouse=True)
def _cache(settings: Any) -> Iterator[None]:
    """A cache that the stores of one test share."""
    backend = "django.core.cache.backends.locmem.LocMemCache"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": __name__}}
    caches["default"].clear()
    yield
    caches["default"].clear()


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def using(request: pytest.FixtureRequest) -> str:
    """Each database in turn."""
    if request.param not in django_settings.ALIASES:
        pytest.skip(f"NO {request.param} HERE")
    return str(django_settings.ALIASES[request.param])


def questions(queries: CaptureQueriesContext) -> int:
    """How often the database was asked for its timeline."""
    return sum(query["sql"] in EPOCH_QUERIES.values() for query in queries)


def refuse(error: Exception) -> Any:
    """An execute wrapper that lets the question fail, and nothing else."""

    def wrapper(execute: Any, sql: str, *arguments: Any) -> Any:
        if sql in EPOCH_QUERIES.values():
            raise error
        return execute(sql, *arguments)

    return wrapper


def test_a_process_asks_once(using: str) -> None:
    """One question serves any number of first requests and replays."""
    store = CachedStore("default", using=using, recheck=timedelta(hours=1))
    with CaptureQueriesContext(connections[using]) as queries:
        for _ in range(3):
            operation = completed(store)
            assert store.recall(operation) is not None
    assert questions(queries) == (connections[using].vendor in EPOCH_QUERIES)


def test_asks_again_after_some_time(using: str) -> None:
    """An answer of the database is believed for ``recheck`` seconds, and only replays ask."""
    store = CachedStore("default", using=using, recheck=timedelta(0))
    operation = completed(store)
    with CaptureQueriesContext(connections[using]) as queries:
        completed(store)
        assert questions(queries) == 0
        for _ in range(2):
            assert store.recall(operation) is not None
    assert questions(queries) == 2 * (connections[using].vendor in EPOCH_QUERIES)


def test_never_asks(using: str) -> None:
    """With ``recheck=None`` nothing is asked, and every timeline is believed."""
    store = CachedStore("default", using=using, recheck=None)
    with CaptureQueriesContext(connections[using]) as queries:
        assert store.recall(completed(store)) is not None
        with store.transaction():
            assert isinstance(store.acquire(completed(store)), Record)
    assert questions(queries) == 0


@pytest.mark.parametrize("ttl", [None, timedelta(days=30)])
def test_max_age_bounds_what_is_not_bound(using: str, ttl: timedelta | None) -> None:
    """However long a record lives, its answer leaves the cache ``max_age`` after it was stored."""
    store, cache = (
        CachedStore("default", using=using, recheck=None, max_age=timedelta(minutes=1)),
        caches["default"],
    )
    operation = completed(store, ttl=ttl)
    expires: Any = cache._expire_info[cache.make_key(store._name(operation.key, operation.scope))]
    assert time.time() < expires <= time.time() + 60


def test_another_server_of_mariadb() -> None:
    """MariaDB numbers no timelines, but another server is another one."""
    if "mariadb" not in django_settings.ALIASES:
        pytest.skip("NO mariadb HERE")
    using = django_settings.ALIASES["mariadb"]
    store = CachedStore("default", using=using, recheck=timedelta(0))
    operation = completed(store)
    assert store.recall(operation) is not None
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT @@server_id")
        (number,) = cursor.fetchone()
        try:
            cursor.execute("SET GLOBAL server_id = %s", [number + 1])
            cursor.execute("SET SESSION server_id = %s", [number + 1])
            assert store.recall(operation) is None
        finally:
            cursor.execute("SET GLOBAL server_id = %s", [number])
            cursor.execute("SET SESSION server_id = %s", [number])
    assert store.recall(operation) is not None


def test_another_database_in_the_same_cache(using: str) -> None:
    """Two projects that share a cache, and even a server, do not share their answers."""
    store = CachedStore("default", using=using, recheck=timedelta(0))
    operation, vendor = completed(store), connections[using].vendor
    if vendor not in EPOCH_QUERIES:
        pytest.skip("is not asked")
    name = {"postgresql": "current_database()", "mysql": "DATABASE()"}[vendor]

    def elsewhere(execute: Any, sql: str, *arguments: Any) -> Any:
        return execute(sql.replace(name, "'another'"), *arguments)

    with connections[using].execute_wrapper(elsewhere):
        assert store.recall(operation) is None


@pytest.mark.parametrize("within", [False, True])
def test_may_not_ask(using: str, within: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Where the user may not ask, nothing is believed, the database answers, and the log says why.

    A transaction that is open is not spoilt by it.
    """
    if connections[using].vendor not in EPOCH_QUERIES:
        pytest.skip("is not asked")
    store = CachedStore("default", using=using, recheck=timedelta(0))
    operation = completed(store)
    denied = refuse(ProgrammingError("permission denied for function pg_control_system"))
    with (
        caplog.at_level(logging.WARNING),
        connections[using].execute_wrapper(denied),
        transaction.atomic(using=using),
    ):
        if within:
            with connections[using].cursor() as cursor:
                cursor.execute("SELECT 1")
        assert store.recall(operation) is None
        found = store.acquire(operation)
        assert isinstance(found, Record)
        assert found.payload == ANSWER
    assert "cannot be queried" in caplog.text


def test_a_fault_is_a_reason_to_ask(using: str) -> None:
    """When the database was away it may be another one now, so the next replay asks."""
    if connections[using].vendor not in EPOCH_QUERIES:
        pytest.skip("is not asked")
    store = CachedStore("default", using=using, recheck=timedelta(hours=1))
    operation = completed(store)

    def away(*_: Any) -> Any:
        raise OperationalError("server closed the connection unexpectedly")

    with connections[using].execute_wrapper(away), pytest.raises(StoreUnavailable):
        store.get(operation.key, operation.scope)
    with CaptureQueriesContext(connections[using]) as queries:
        assert store.recall(operation) is not None
    assert questions(queries) == 1


def test_away_when_asked(using: str) -> None:
    """While the database cannot be reached nobody knows, so nothing is replayed from the cache."""
    if connections[using].vendor not in EPOCH_QUERIES:
        pytest.skip("is not asked")
    store = CachedStore("default", using=using, recheck=timedelta(0))
    operation = completed(store)
    gone = refuse(OperationalError("server closed the connection unexpectedly"))
    with connections[using].execute_wrapper(gone):
        assert store.recall(operation) is None
    assert store.recall(operation) is not None


def test_what_was_read_before_the_question_is_not_cached(using: str) -> None:
    """A process that reads an answer before it knows the timeline caches it the next time."""
    operation = completed(CachedStore("default", using=using, recheck=timedelta(hours=1)))
    caches["default"].clear()
    fresh = CachedStore("default", using=using, recheck=timedelta(hours=1))
    for cached in (False, True):
        with fresh.transaction():
            assert isinstance(fresh.acquire(operation), Record)
        assert (fresh.recall(operation) is not None) is cached
