"""For tests: one request whose process is killed at a chosen moment, and its retry."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final, Literal, TypeVar, get_args

from django.db import connections

from ..models import DatabaseNow, IdempotencyKey, IdempotencyKeyQuerySet
from ..stores import Status, stores
from .races import validate_databases
from .writes import bookkeeping_tables, table_written

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
    process = fork.Process(target=_run, args=(send, at, writer))
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


def _run(  # pragma: no cover  # only in a process that is not measured
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
