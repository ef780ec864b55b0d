"""What tests of several modules ask for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import compress
from typing import Any

import pytest
from django.core.management.commands import flush
from django.db.backends.base.base import BaseDatabaseWrapper

from idempotency_django import signals
from tests.rabbit import rabbitmq
from tests.servers import Server

SIGNALS = "claimed completed replayed conflicted mismatched failed released lost".split()


KEPT = frozenset({"auth_permission", "django_content_type"})
"""Tables of what Django itself makes of the apps, which no test changes."""


@pytest.fixture(scope="session", autouse=True)
def _flush_what_is_there() -> Iterator[None]:
    """Empty only the tables that have rows, and leave permissions and content types, after a test.

    Django truncates each table of each database, after each test that needs transactions of its
    own, and deletes permissions and content types to make them again: most of the time of all
    tests went into that. Most tests fill one or two tables of one database.
    """

    def sql_flush(
        style: Any,
        connection: BaseDatabaseWrapper,
        reset_sequences: bool = True,
        allow_cascade: bool = False,
    ) -> list[str]:
        existing = connection.introspection.django_table_names(only_existing=True)
        filled = _filled(connection, [table for table in existing if table not in KEPT])
        if connection.vendor != "postgresql":
            return connection.ops.sql_flush(style, filled, reset_sequences=False)
        # There a truncated table gets new files, with each of its indexes: slow, but for many rows.
        many = _filled(connection, filled, more_than=1000)
        few = [table for table in filled if table not in many]
        quoted = connection.ops.quote_name
        return [
            *(f"TRUNCATE {quoted(table)} CASCADE" for table in many),
            *(f"DELETE FROM {quoted(table)}" for table in few),
        ]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flush, "sql_flush", sql_flush)
        patched.setattr(flush, "emit_post_migrate_signal", lambda *args, **options: None)
        yield


def _filled(connection: BaseDatabaseWrapper, tables: list[str], more_than: int = 0) -> list[str]:
    """Those of the tables that have more rows than that."""
    if not tables:
        return []
    row = f"(SELECT 1 FROM %s LIMIT 1 OFFSET {more_than})"
    rows = ", ".join(f"EXISTS {row % connection.ops.quote_name(table)}" for table in tables)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {rows}")
        return list(compress(tables, cursor.fetchone()))


@pytest.fixture(scope="session")
def rabbit() -> Iterator[Server]:
    """A RabbitMQ for all tests, started for the first that asks; name your queues anew."""
    with rabbitmq() as server:
        if server is None:
            pytest.skip("NO rabbitmq-server FOUND: install it, or set TEST_RABBITMQ_URL")
        yield server


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
    """Keeps what is logged of protected views that answered without a claim."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, where it is of that kind."""
        if "is not protected" in str(record.msg):
            self.records.append(record)


@pytest.fixture(autouse=True)
def unprotected() -> Iterator[list[logging.LogRecord]]:
    """No test may pass in which a protected view answered without a claim."""
    handler = _Unprotected()
    logger = logging.getLogger("idempotency_django")
    logger.addHandler(handler)
    yield handler.records
    logger.removeHandler(handler)
    assert handler.records == []
