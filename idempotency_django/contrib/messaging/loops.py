"""The loop of each command that runs until it is stopped, and what notices that it hangs."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Final

from django.db import Error as DatabaseFault
from django.db import connections

from ...errors import StoreUnavailable
from ...stores import DIALECTS
from .databases import close_lost_connections, database

logger = logging.getLogger("idempotency_django")

HANDLER_TIMEOUT: Final = timedelta(minutes=15)
"""After this time, the log says what hangs, and the process gives no sign of life."""
BEAT: Final = 1.0
"""Seconds between two signs of life."""

_handled: Final[dict[int, tuple[str, float]]] = {}
"""What each thread handles, and since when by ``time.monotonic()``."""


@contextmanager
def handling(what: str) -> Iterator[None]:
    """Say what this thread handles, for the case that it hangs."""
    thread = threading.get_ident()
    _handled[thread] = (what, time.monotonic())
    try:
        yield
    finally:
        _handled.pop(thread, None)


def repeat(
    work: Callable[[], object],
    stop: threading.Event,
    *,
    what: str,
    poll: timedelta,
    wait: Callable[[float], object] | None = None,
    health: str = "",
) -> None:
    """Work until ``stop`` is set. An outage of the database is logged, and work resumes after it.

    Args:
        work: does what is due; whether there may be more.
        stop: when to stop.
        what: what works, in logs.
        poll: how long to wait when there was nothing to do.
        wait: waits for at most this number of seconds; by default until ``stop`` is set.
        health: a file that is touched every second, unless something hangs; empty: none.
    """
    with _watched(what, health):
        while not stop.is_set():
            close_lost_connections()
            try:
                is_busy = work()
            except (DatabaseFault, StoreUnavailable) as error:
                if _is_conflict(error):
                    logger.warning(
                        "The %s met a conflict with another transaction, and retries.", what
                    )
                else:
                    logger.exception(
                        "The %s cannot reach its database and will retry. No message is lost.", what
                    )
                is_busy = False
            if not is_busy:
                (wait or stop.wait)(poll.total_seconds())


@contextmanager
def _watched(what: str, health: str) -> Iterator[None]:
    """Give signs of life, and log what this thread hangs in."""
    if health:
        Path(health).touch()  # a path that cannot be written to fails at once
    thread, ended = threading.get_ident(), threading.Event()

    def watch() -> None:
        reported = None
        while not ended.wait(BEAT):
            late = time.monotonic() - HANDLER_TIMEOUT.total_seconds()
            if health and not any(since < late for _, since in [*_handled.values()]):
                with suppress(OSError):  # the next one may succeed
                    Path(health).touch()
            current = _handled.get(thread)
            if current and current[1] < late and current != reported:
                reported = current
                logger.critical(
                    "The %s has handled %s for more than %s, and nothing else. The stacks of its "
                    "threads are on stderr. Restart it, and give the handler a timeout.",
                    what,
                    current[0],
                    HANDLER_TIMEOUT,
                )
                faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)

    watcher = threading.Thread(target=watch, name=f"watch {what}", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _is_conflict(error: Exception) -> bool:
    """Whether it is a conflict such as a serialization failure, and the database can be reached."""
    using = database()
    return DIALECTS[connections[using].vendor](using).is_busy(error)
