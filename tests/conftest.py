"""What tests of several modules ask for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management.commands import flush
from django.db.backends.base.base import BaseDatabaseWrapper

from idempotency_django import signals

SIGNALS = "claimed completed replayed conflicted mismatched failed released lost".split()


KEPT = frozenset({"auth_permission", "django_content_type"})
"""Tables of what Django itself makes of the apps, which no test changes."""


@pytest.fixture(scope="session", autouse=True)
def _keep_permissions() -> Iterator[None]:
    """Leave permissions and content types where they are when a test's tables are flushed.

    Django deletes them too and makes them again for each database, after each test that needs
    transactions of its own: that took four fifths of the time of all tests.
    """

    def sql_flush(
        style: Any,
        connection: BaseDatabaseWrapper,
        reset_sequences: bool = True,
        allow_cascade: bool = False,
    ) -> list[str]:
        existing = connection.introspection.django_table_names(only_existing=True)
        return connection.ops.sql_flush(
            style,
            [table for table in existing if table not in KEPT],
            reset_sequences=reset_sequences,
            allow_cascade=allow_cascade,
        )

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flush, "sql_flush", sql_flush)
        patched.setattr(flush, "emit_post_migrate_signal", lambda *args, **options: None)
        yield


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
