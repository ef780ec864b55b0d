"""What tests of several modules ask for."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import compress
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.contrib.auth.signals import user_logged_in
from django.core.management.color import no_style
from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import Client, TransactionTestCase
from redis import Redis

from idempotency_django import signals
from idempotency_django.contrib.messaging import inbox as receivers
from idempotency_django.stores import Store
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.testing import effects
from tests.settings import ALIASES
from tests.support.kafka import kafka as kafka_server
from tests.support.rabbit import rabbitmq
from tests.support.servers import Server, valkey
from tests.support.sqs import sqs

SIGNALS = "claimed completed replayed conflicted mismatched failed released lost".split()


AUDITED = (
    "test_effects_outside.py",
    "test_examples[docs/operations/testing.md]",
)
"""Tests that install an audit hook, which stays as long as the process: parts of their ids."""


def pytest_sessionstart() -> None:
    """No login writes to its user's row."""
    user_logged_in.disconnect(dispatch_uid="update_last_login")


def pytest_collection_finish() -> None:
    """What all tests have imported stays: no collection of garbage looks at it again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run them last: from then on, coverage sees no new thread."""
    items.sort(key=_may_install)
    if os.environ.get("TEST_LEFT_OUT") == "1":
        left_out, others = partition(_is_in_make_test, items)
        items[:] = left_out
        config.hook.pytest_deselected(items=[*others])


def _is_in_make_test(item: pytest.Item) -> bool:
    """Whether ``make test`` runs it: on PostgreSQL, and tests of SQL on all databases."""
    if item.get_closest_marker("nightly"):
        return False
    elsewhere = any(name in item.nodeid for name in ("mariadb", "sqlite"))
    return not elsewhere or item.get_closest_marker("driver") is not None


def partition(
    condition: Callable[[pytest.Item], bool], items: Iterable[pytest.Item]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The items that do not meet the condition, and those that do."""
    parts: tuple[list[pytest.Item], list[pytest.Item]] = [], []
    for item in items:
        parts[condition(item)].append(item)
    return parts


def pytest_runtest_setup(item: pytest.Item) -> None:
    """With a hook, Python 3.11 loses threads that install their trace functions at once
    (python/cpython#98257), as coverage makes each new thread do.
    """
    if sys.version_info < (3, 12) and _may_install(item):
        threading.settrace(None)  # type: ignore[arg-type]


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test that installs the hook is one of them."""
    if effects._install.cache_info().currsize:
        assert _may_install(item), "Add the test to AUDITED."


def _may_install(item: pytest.Item) -> bool:
    return any(part in item.nodeid for part in AUDITED)


KEPT = frozenset({"auth_permission", "django_content_type"})
"""Tables of what Django itself makes of the apps, which no test changes."""


class Broom:
    """Empties a database after a test, over a connection of its own, which stays open.

    Django closes the connections of a test with it, and would have to open one to each database to
    truncate each table of it, and to make permissions and content types again: most of the time of
    all tests went into that. Most tests fill one or two tables of one database.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection.copy()
        self._tables: list[str] = []

    def sweep(self) -> None:
        """Delete all rows, but those that are there from the beginning."""
        try:
            filled = self._filled(self._tables or self._existing())
        except DatabaseError:  # a test dropped a table, or ended all sessions
            self.put_away()
            filled = self._filled(self._existing())
        if not filled:
            return
        for statement in ("BEGIN", *self._deletions(filled), "COMMIT"):
            self._execute(statement)

    def put_away(self) -> None:
        """Leave the database."""
        self._connection.close()

    def _existing(self) -> list[str]:
        tables = self._connection.introspection.django_table_names(only_existing=True)
        self._tables = [table for table in tables if table not in KEPT]
        return self._tables

    def _filled(self, tables: list[str], more_than: int = 0) -> list[str]:
        """Those of the tables that have more rows than that."""
        if not tables:
            return []
        row = f"(SELECT 1 FROM %s LIMIT 1 OFFSET {more_than})"
        quoted = self._connection.ops.quote_name
        found = self._execute(
            "SELECT " + ", ".join(f"EXISTS {row % quoted(table)}" for table in tables)
        )
        return list(compress(tables, found))

    def _deletions(self, tables: list[str]) -> list[str]:
        if self._connection.vendor != "postgresql":
            return self._connection.ops.sql_flush(no_style(), tables, reset_sequences=False)
        # There a truncated table gets new files, with each of its indexes: slow, but for many rows.
        many = self._filled(tables, more_than=1000)
        quoted = self._connection.ops.quote_name
        return [
            *(f"TRUNCATE {quoted(table)} CASCADE" for table in many),
            *(f"DELETE FROM {quoted(table)}" for table in tables if table not in many),
        ]

    def _execute(self, statement: str) -> tuple[Any, ...]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone() if statement.startswith("SELECT") else ()


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """The databases, and what empties them after each test that needs transactions of its own."""
    brooms = {alias: Broom(connections[alias]) for alias in connections}

    def sweep(test: TransactionTestCase) -> None:
        connections.close_all()  # whatever the test left open is rolled back
        for alias in test._databases_names(include_mirrors=False):
            brooms[alias].sweep()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TransactionTestCase, "_fixture_teardown", sweep)
        yield
    for broom in brooms.values():
        broom.put_away()
    with django_db_blocker.unblock():
        for alias in connections:
            end_other_sessions(alias)


def end_other_sessions(alias: str) -> None:
    """End what a test has left open, or PostgreSQL would not drop its database."""
    connection = connections[alias]
    if connection.vendor != "postgresql":
        return
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT query, pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        for query, _ in cursor.fetchall():
            print(f"A test has left a session open. Its last statement: {query[:200]}")


@pytest.fixture(scope="session")
def _rabbit() -> Iterator[Future[Server | None]]:
    """A RabbitMQ that is about to start."""
    with ExitStack() as stack, ThreadPoolExecutor(1) as starting:
        yield starting.submit(stack.enter_context, rabbitmq())


@pytest.fixture(scope="session", autouse=True)
def _early(request: pytest.FixtureRequest) -> None:
    """RabbitMQ needs seconds to start: it does so while tests run that do not ask for it."""
    needing = {"rabbit", "place"}  # the latter has a place at any broker
    if any(needing.intersection(getattr(it, "fixturenames", ())) for it in request.session.items):
        request.getfixturevalue("_rabbit")


@pytest.fixture(scope="session")
def rabbit(_rabbit: Future[Server | None]) -> Server:
    """A RabbitMQ for all tests; name your queues anew."""
    server = _rabbit.result()
    if server is None:
        pytest.skip("NO rabbitmq-server FOUND: install it, or set TEST_RABBITMQ_URL")
    return server


@pytest.fixture(scope="session")
def kafka() -> Iterator[Server]:
    """A Kafka for all tests, started for the first that asks; name your topics anew."""
    with kafka_server() as server:
        yield server


@pytest.fixture(scope="session")
def sqs_server() -> Iterator[Server]:
    """An SQS for all tests, started for the first that asks; name your queues anew."""
    with sqs() as server:
        yield server


@pytest.fixture(scope="session")
def _redis() -> Iterator[Server]:
    with valkey() as server:
        yield server


@pytest.fixture(scope="module")
def redis_server(_redis: Server) -> Server:
    """A Redis for all tests, started for the first that asks, and empty for each module."""
    if _redis.pid is not None:  # else it is not ours
        with Redis.from_url(_redis.url) as client:
            client.flushall()
    return _redis


@pytest.fixture
def alice(client: Client) -> Client:
    """A client that is Alice, who may add effects."""
    user = User.objects.create_user("alice", password="alice")
    user.user_permissions.add(Permission.objects.get(codename="add_effect"))
    client.force_login(user)
    return client


@pytest.fixture(params=[*ALIASES, "memory"])
def store(request: pytest.FixtureRequest) -> Store:
    """A store that keeps steps: one on each database, and the one in memory."""
    if request.param == "memory":
        return MemoryStore("default")
    return DatabaseStore("default", using=ALIASES[request.param])


@pytest.fixture(params=[True, False], ids=["atomic requests", "no atomic requests"])
def atomic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With and without ``ATOMIC_REQUESTS``."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", request.param)
    return bool(request.param)


@pytest.fixture
def always_atomic(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``ATOMIC_REQUESTS``."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)


@pytest.fixture
def no_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A project that knows nothing of the receivers of other tests: checks look at each."""
    monkeypatch.setattr(receivers, "_RECEIVERS", {})


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    """A thread with connections of its own."""
    with ThreadPoolExecutor(1) as thread:
        yield thread
        thread.submit(connections.close_all).result(60)


@pytest.fixture
def sent() -> Iterator[list[str]]:
    """The names of the signals that were sent, in order."""
    names: list[str] = []
    receivers = []
    for name in SIGNALS:

        def receive(name: str = name, **_: Any) -> None:
            names.append(name)

        receivers.append((getattr(signals, name), receive))
        getattr(signals, name).connect(receive)
    yield names
    for signal, receive in receivers:
        signal.disconnect(receive)


class _Unprotected(logging.Handler):
    """Keeps what is logged of protected views that responded without a claim."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, where it is of that kind."""
        if "is not protected" in str(record.msg):
            self.records.append(record)


@pytest.fixture(autouse=True)
def unprotected() -> Iterator[list[logging.LogRecord]]:
    """No test may pass in which a protected view responded without a claim."""
    handler = _Unprotected()
    logger = logging.getLogger("idempotency_django")
    logger.addHandler(handler)
    yield handler.records
    logger.removeHandler(handler)
    assert handler.records == []
