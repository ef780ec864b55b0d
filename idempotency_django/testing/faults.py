"""For tests: simultaneous duplicates, and a request whose process is killed, with its retry."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final, Literal, TypeVar, get_args

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..http import REPLAYED_HEADER
from ..models import DatabaseNow, IdempotencyKey, IdempotencyKeyQuerySet
from ..stores import Status, stores
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
        ended = list(threads.map(partial(_race, send, together, meeting), range(n)))
    return Race(
        [each for each in ended if not isinstance(each, Exception)],
        [each for each in ended if isinstance(each, Exception)],
    )


def _race(send: Callable[[], Any], together: threading.Barrier, meeting: _Meeting, _: int) -> Any:
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


R = TypeVar("R")
At = Literal["before-effect", "after-effect", "after-commit"]

_ATTEMPTS: Final = 10
_PAUSE, _LONGEST_PAUSE = 0.01, 1.0  # seconds
_BUSY: Final = (409, 503)
_REFUSED: Final = 400  # statuses from here on say that there was no effect
_PAST: Final = timedelta(seconds=1)


def crash(send: Callable[[], R], at: At = "after-effect") -> R:
    """Send a request whose process is killed, then send it again until the key is free. ::

        response = crash(send, at="after-effect")
        assert response.status_code == 201
        assert Charge.objects.count() == 1

    The first ``send()`` runs in a process of its own, which gets SIGKILL:

    ``"before-effect"``
        before its first write.
    ``"after-effect"``
        after its first write, before the next statement or COMMIT.
    ``"after-commit"``
        when the response is ready, but not sent.

    Leases have ended for the retry.

    Args:
        send: sends the request with a key, and returns the response.
        at: the moment.

    Returns:
        The response to the retry. While it is 409 or 503, the request is sent again, ten times at
        most.

    Raises:
        AssertionError: the process was not killed, because it made no write.
        ImproperlyConfigured: a transaction is open, or a database is in memory.
        ValueError: there is no such moment, or the system has no ``os.fork()``, as Windows.
    """
    if at not in get_args(At):
        raise ValueError(f"There is no moment {at!r}. Choose from {', '.join(get_args(At))}.")
    validate_databases("the processes of crash()")
    for connection in connections.all():  # so that the new process has nothing of this one's
        connection.close()
        if hasattr(connection, "close_pool"):
            connection.close_pool()
    fork = get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    process = fork.Process(target=_crash, args=(send, at, writer))
    with warnings.catch_warnings():
        # Python warns of threads. The heartbeats know about forks; others should not be there.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    writer.close()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        raise AssertionError(f"The process was not killed at {at!r}: {reader.recv()}.")
    reader.close()
    for attempt in range(_ATTEMPTS):
        _end_leases()
        response = send()
        if getattr(response, "status_code", 0) not in _BUSY:
            break
        # The server may not have noticed yet that the process is dead.
        time.sleep(min(_PAUSE * 2**attempt, _LONGEST_PAUSE))
    return response


def _crash(  # pragma: no cover  # only in a process that is not measured
    send: Callable[[], object], at: At, writer: Connection
) -> None:
    """Send the request in the new process, and say why it was not killed."""
    gc.freeze()  # what the parent has left for its collector is none of ours
    ignored = bookkeeping_tables()
    is_written = False

    def around(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        nonlocal is_written
        table = table_written(str(sql))
        is_effect = table is not None and table not in ignored
        if is_written or (is_effect and at == "before-effect"):
            os.kill(os.getpid(), signal.SIGKILL)
        result = execute(sql, params, many, context)
        if is_effect and at == "after-effect":
            if context["connection"].in_atomic_block:  # whose COMMIT may be no statement of its own
                os.kill(os.getpid(), signal.SIGKILL)
            is_written = True  # when the rows that it returns are read
        return result

    end = "it ended without a write to your tables"
    try:
        with ExitStack() as observed:
            for connection in connections.all():
                observed.enter_context(connection.execute_wrapper(around))
            status = getattr(send(), "status_code", 0)
        if status >= _REFUSED:
            end = f"HTTP {status}"
        elif at == "after-commit":
            os.kill(os.getpid(), signal.SIGKILL)
    except BaseException as error:  # noqa: BLE001  # whatever the request ends in
        end = f"{type(error).__name__}: {error}"
    if is_written:
        os.kill(os.getpid(), signal.SIGKILL)
    connections.close_all()
    writer.send(end)


def _end_leases() -> None:
    """End all leases now, by the clock of the database."""
    now = DatabaseNow()
    for using in {store.using for store in stores.all()} - {None}:
        records = IdempotencyKeyQuerySet(IdempotencyKey, using=using)
        left = records.filter(status=Status.IN_PROGRESS).exclude(lease_expires_at__lte=now)
        left.update(lease_expires_at=now - _PAST)
