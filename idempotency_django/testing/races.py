"""For tests: simultaneous duplicates, which meet before the first of them writes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..http import REPLAYED_HEADER
from .writes import bookkeeping_tables, table_written

_PATIENCE: Final = 0.5
"""Seconds that a request waits for the others before its first write: they may wait for it."""

_LONGEST: Final = 60
"""Seconds after which a race is given up."""


@dataclass(frozen=True)
class Race:
    """The responses to simultaneous duplicates.

    Attributes:
        responses: what was returned, in no order.
        errors: what was raised.
    """

    responses: list[Any]
    errors: list[Exception]

    @property
    def executed(self) -> int:
        """The number of duplicates that were executed: below 400, and not a replay."""
        succeeded = [each for each in self.responses if getattr(each, "status_code", 0) < 400]
        return len(
            [each for each in succeeded if REPLAYED_HEADER not in getattr(each, "headers", ())]
        )


class _Meeting:
    """Where requests wait for each other, once each: until all others are there or have ended."""

    def __init__(self, expected: int) -> None:
        self._missing = expected
        self._changed = threading.Condition()
        self._mine = threading.local()
        self._ignored = bookkeeping_tables()

    def come(self, *, wait: bool) -> None:
        if getattr(self._mine, "came", False):
            return
        self._mine.came = True
        with self._changed:
            self._missing -= 1
            self._changed.notify_all()
            if wait:
                self._changed.wait_for(lambda: self._missing == 0, _PATIENCE)

    def before_write(self, execute: Any, sql: Any, *arguments: Any) -> Any:
        table = table_written(str(sql))
        if table is not None and table not in self._ignored:
            self.come(wait=True)
        return execute(sql, *arguments)


def race(send: Callable[[], Any], n: int = 8) -> Race:
    """Send the same request from several threads at once. ::

        def send():
            return Client().post("/charges/", {"amount": 500}, headers={"Idempotency-Key": key})

        assert race(send).executed == 1
        assert Charge.objects.count() == 1

    They start together. Before its first write, each waits half a second for the others to come to
    theirs. So a view that looks first and writes later executes each of them.

    Args:
        send: sends the request with a key, over a client of its own, and returns the response.
        n: how often it is sent.

    Raises:
        ImproperlyConfigured: a transaction is open, or a database is in memory.
    """
    validate_databases("the threads of race()")
    together, meeting = threading.Barrier(n, timeout=_LONGEST), _Meeting(n)
    with ThreadPoolExecutor(n) as threads:
        ended = list(threads.map(partial(_run, send, together, meeting), range(n)))
    return Race(
        [each for each in ended if not isinstance(each, Exception)],
        [each for each in ended if isinstance(each, Exception)],
    )


def _run(send: Callable[[], Any], together: threading.Barrier, meeting: _Meeting, _: int) -> Any:
    try:
        with ExitStack() as observed:
            for connection in connections.all():
                observed.enter_context(connection.execute_wrapper(meeting.before_write))
            together.wait()
            return send()
    except Exception as error:  # noqa: BLE001  # whatever a request ends in
        return error
    finally:
        meeting.come(wait=False)
        connections.close_all()


def validate_databases(what: str) -> None:
    """Refuse to work where other connections would not see what this one has written.

    Args:
        what: has those connections, such as ``"the threads of race()"``.

    Raises:
        ImproperlyConfigured: a transaction is open, or a database is in memory.
    """
    for connection in connections.all():
        if connection.in_atomic_block:
            raise ImproperlyConfigured(
                f"A transaction is open on the database {connection.alias!r}, so {what} do not see "
                "the test's data. Use a TransactionTestCase, or "
                "pytest.mark.django_db(transaction=True)."
            )
        if getattr(connection, "is_in_memory_db", bool)():
            raise ImproperlyConfigured(
                f"The database {connection.alias!r} is in the memory of this process, so {what} do "
                "not see it. Use a file for tests: "
                'DATABASES["default"]["TEST"] = {"NAME": BASE_DIR / "test.sqlite3"}.'
            )
