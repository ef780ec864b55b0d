"""The loop of ``run_messaging``, which runs until it is stopped, and what notices that it hangs.

A handler that hangs cannot be ended. So its part of the loop goes on in a fresh thread, without the
topic or source that hangs: there is at most one thread for each. A handler that returns after all
is settled by its own thread, which then ends. What it owns is fenced as between two processes:
where its lease is over and another one has claimed a message since, the late thread changes
nothing.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

from django.db import Error as DatabaseFault
from django.db import ProgrammingError, connections

from ...errors import StoreUnavailable
from .databases import close_lost_connections
from .heartbeats import Beat

logger = logging.getLogger("idempotency_django")

POLL: Final = timedelta(seconds=1)
PATIENCE: Final = timedelta(minutes=1)
"""After this time, the loop goes on in another thread. What was claimed together is due by then."""
HANDLER_TIMEOUT: Final = timedelta(minutes=15)
"""After this time, the log says what hangs, and the process gives no more signs of life."""
BEAT: Final = 1.0
"""Seconds between two signs of life."""


@dataclass(slots=True, eq=False)
class Handling:
    """What a thread has begun to handle: messages of a topic of the outbox, or a source of the
    inbox.
    """

    queue: str
    place: str
    what: str
    since: float  # by time.monotonic()
    is_reported: bool = False

    def lasts(self, limit: timedelta) -> bool:
        """Whether it has taken longer than that."""
        return time.monotonic() - self.since > limit.total_seconds()


_handled: Final[dict[threading.Thread, Handling]] = {}


@contextmanager
def handling(queue: str, place: str, what: str) -> Iterator[Handling]:
    """Say what this thread handles, for the case that it hangs."""
    thread = threading.current_thread()
    _handled[thread] = current = Handling(queue, place, what, time.monotonic())
    try:
        yield current
    finally:
        _handled.pop(thread, None)


def hanging(queue: str) -> list[str]:
    """The topics or sources that a thread of this process hangs in: no other may follow it."""
    current = [*_handled.values()]
    return [each.place for each in current if each.queue == queue and each.lasts(PATIENCE)]


@dataclass(slots=True)
class Part:
    """A part of the loop, which repeats its work in a thread of its own.

    Attributes:
        name: what works, in logs.
        work: does what is due, but for what hangs; whether there may be more.
        poll: how long to wait when there was nothing to do.
        goes_on: whether it goes on in a fresh thread while its work hangs.
    """

    name: str
    work: Callable[[], object]
    poll: timedelta = POLL
    goes_on: bool = True
    threads: list[threading.Thread] = field(default_factory=list, init=False)
    """The last one works; the others hang, or have hung."""

    def begin(self, stop: threading.Event, errors: list[BaseException]) -> None:
        """Work in a fresh thread until ``stop`` is set; an error is noted, and sets it."""
        thread = threading.Thread(
            target=self._repeat, args=[stop, errors], name=self.name, daemon=True
        )
        self.threads.append(thread)
        thread.start()

    def _repeat(self, stop: threading.Event, errors: list[BaseException]) -> None:
        try:
            while not stop.is_set() and self.threads[-1] is threading.current_thread():
                stop.wait(self._attempt().total_seconds())
        except BaseException as error:
            logger.critical("The %s ended with an error.", self.name, exc_info=True)
            errors.append(error)
            stop.set()
        finally:
            connections.close_all()

    def _attempt(self) -> timedelta:
        """Work once; how long to wait then."""
        close_lost_connections()
        try:
            return timedelta(0) if self.work() else self.poll
        except ProgrammingError:
            raise  # a table or a column is missing: it is not migrated
        except (DatabaseFault, StoreUnavailable):
            logger.exception(
                "The %s met an error of its database, and will retry. No message is lost.",
                self.name,
            )
            return min(self.poll, POLL)

    def go_on(self, stop: threading.Event, errors: list[BaseException]) -> None:
        """Begin a fresh thread if the last one hangs."""
        current = _handled.get(self.threads[-1])
        if current and self.goes_on and current.lasts(PATIENCE) and not stop.is_set():
            logger.warning(
                "The %s has handled %s for more than %s. All others go on in another thread.",
                self.name,
                current.what,
                PATIENCE,
            )
            self.begin(stop, errors)


def run(
    parts: Sequence[Part], stop: threading.Event, *, name: str = "messaging", health: str = ""
) -> None:
    """Have all parts work until ``stop`` is set, and finish what they have in hand.

    If one ends with an error, it stops the others, and the error is raised, so that a supervisor
    can start the process again. An outage of the database is logged, and work resumes after it.

    Args:
        parts: what works.
        stop: when to stop.
        name: what runs, for its row among the running processes.
        health: a file that is touched every second, unless something hangs; empty: none.
    """
    if health:
        Path(health).touch()  # a path that cannot be written to fails at once
    beat, errors, is_told = Beat(name), list[BaseException](), False
    for part in parts:
        part.begin(stop, errors)
    while alive := [each for part in parts for each in part.threads if each.is_alive()]:
        for part in parts:
            part.go_on(stop, errors)
        hung = [each for each in [*_handled.values()] if each.lasts(HANDLER_TIMEOUT)]
        for each in hung:
            _report(each)
        # While something hangs, or is all that it waits for, there is no sign of life.
        if not hung and any(part.threads[-1].is_alive() for part in parts):
            if health:
                Path(health).touch()
            beat.beat()  # the database may be slow
        if stop.is_set() and not is_told:
            is_told = True
            waits = ", ".join(each.what for each in [*_handled.values()])
            logger.info("Stopping%s.", f", after {waits}" if waits else "")
        alive[-1].join(BEAT)
    beat.end()
    for error in errors:
        if isinstance(error, Exception):
            raise error
        raise RuntimeError(f"A thread of messaging has ended with {error!r}.") from error


def _report(hung: Handling) -> None:
    """Log what hangs, once, with the stacks of all threads."""
    if hung.is_reported:
        return
    hung.is_reported = True
    logger.critical(
        "Messaging has handled %s for more than %s. The stacks of its threads are on stderr. "
        "Restart it, and give the handler a timeout.",
        hung.what,
        HANDLER_TIMEOUT,
    )
    faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
