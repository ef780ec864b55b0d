"""The loop of each command that runs until it is stopped, and what notices that it hangs.

A handler that hangs cannot be ended. So the loop goes on in a fresh thread, without the topic or
source that hangs: there is at most one thread for each. A handler that returns after all is settled
by its own thread, which then ends. What it owns is fenced as between two processes: where its lease
is over and another one has claimed a message since, the late thread changes nothing.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from django.db import Error as DatabaseFault
from django.db import ProgrammingError, connections

from ...errors import StoreUnavailable
from ...stores import DIALECTS
from .databases import close_lost_connections, database
from .heartbeats import Beat

logger = logging.getLogger("idempotency_django")

PATIENCE: Final = timedelta(minutes=1)
"""After this time, the loop goes on in another thread. What was claimed together is due by then."""
HANDLER_TIMEOUT: Final = timedelta(minutes=15)
"""After this time, the log and the status say what hangs, and the health file is not touched."""
BEAT: Final = 1.0
"""Seconds between two signs of life."""


@dataclass(frozen=True, slots=True, eq=False)
class Handling:
    """What a thread has begun to handle: messages of a topic of the outbox, or a source of the
    inbox.
    """

    queue: str
    place: str
    what: str
    since: float  # by time.monotonic()

    def lasts(self, limit: timedelta) -> bool:
        """Whether it has taken longer than that."""
        return time.monotonic() - self.since > limit.total_seconds()


_handled: Final[dict[threading.Thread, Handling]] = {}


@contextmanager
def handling(queue: str, place: str, what: str) -> Iterator[None]:
    """Say what this thread handles, for the case that it hangs."""
    thread = threading.current_thread()
    _handled[thread] = Handling(queue, place, what, time.monotonic())
    try:
        yield
    finally:
        _handled.pop(thread, None)


def hanging(queue: str) -> list[str]:
    """The topics or sources that a thread of this process hangs in: no other may follow it."""
    current = [*_handled.values()]
    return [each.place for each in current if each.queue == queue and each.lasts(PATIENCE)]


def repeat(
    work: Callable[[], object],
    stop: threading.Event,
    *,
    what: str,
    poll: timedelta,
    health: str = "",
) -> None:
    """Work until ``stop`` is set. An outage of the database is logged, and work resumes after it.

    Args:
        work: does what is due, but for what hangs; whether there may be more.
        stop: when to stop.
        what: what works, in logs.
        poll: how long to wait when there was nothing to do.
        health: a file that is touched every second, unless something hangs in this process, in
            another loop, too; empty: none.
    """
    if health:
        Path(health).touch()  # a path that cannot be written to fails at once
    workers: list[threading.Thread] = []  # the last one works; the others hang, or have hung
    beat, reported, errors = Beat(what), list[Handling](), list[BaseException]()

    def loop() -> None:
        try:
            while not (stop.is_set() or errors) and workers[-1] is threading.current_thread():
                if not _attempt(work, what):
                    stop.wait(poll.total_seconds())
        except BaseException as error:
            logger.critical("The %s ended with an error.", what, exc_info=True)
            errors.append(error)
        finally:
            connections.close_all()

    def begin() -> None:
        workers.append(threading.Thread(target=loop, name=what, daemon=True))
        workers[-1].start()

    def look() -> None:
        current = _handled.get(workers[-1])
        if current and current.lasts(PATIENCE) and not (stop.is_set() or errors):
            logger.warning(
                "The %s has handled %s for more than %s. All others go on in another thread.",
                what,
                current.what,
                PATIENCE,
            )
            begin()
        hung = [each for each in map(_handled.get, workers) if each]
        hung = [each for each in hung if each.lasts(HANDLER_TIMEOUT)]
        if workers[-1].is_alive():  # else it only waits for what hangs
            beat.beat(hung[-1].what if hung else "")
            if health and not any(each.lasts(HANDLER_TIMEOUT) for each in [*_handled.values()]):
                with suppress(OSError):  # the next one may succeed
                    Path(health).touch()
        if hung and hung[-1] not in reported:
            reported.append(hung[-1])
            logger.critical(
                "The %s has handled %s for more than %s. The stacks of its threads are on "
                "stderr. Restart it, and give the handler a timeout.",
                what,
                hung[-1].what,
                HANDLER_TIMEOUT,
            )
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)

    begin()
    while alive := [each for each in workers if each.is_alive()]:
        try:
            look()
        except Exception:
            logger.exception("What watches the %s met an error, and goes on.", what)
        alive[-1].join(BEAT)
    beat.end()
    for error in errors:
        raise error


def _attempt(work: Callable[[], object], what: str) -> bool:
    """Work once; whether there may be more to do now."""
    close_lost_connections()
    try:
        return bool(work())
    except ProgrammingError:
        raise  # a table or a column is missing: it is not migrated
    except (DatabaseFault, StoreUnavailable) as error:
        if _is_conflict(error):
            logger.warning("The %s met a conflict with another transaction, and retries.", what)
        else:
            logger.exception(
                "The %s cannot reach its database and will retry. No message is lost.", what
            )
        return False


def _is_conflict(error: Exception) -> bool:
    """Whether it is a conflict such as a serialization failure, and the database can be reached."""
    using = database()
    return DIALECTS[connections[using].vendor](using).is_busy(error)
