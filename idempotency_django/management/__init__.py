"""What commands share: their graceful end, and the findings of what waits for too long.

No finding counts a whole table: each reads up to ``MAX_COUNTED`` rows that an index leads to.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from django.db.models import QuerySet

from ..models import DatabaseNow, IdempotencyKey
from ..stores import Status, stores

__all__ = [
    "PURGE_AGE",
    "Finding",
    "findings",
    "overdue",
    "register_health",
    "stop_on_signals",
]

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_on_signals(stop: threading.Event | None = None) -> Iterator[threading.Event]:
    """An event that the first SIGTERM or Ctrl-C sets; a second one ends the process as usual.

    A signal that is ignored stays so, as Ctrl-C is in the background. Signals are the main
    thread's: in another one, the event must be set by other means.

    Args:
        stop: the event to set; by default a new one.
    """
    stop = stop or threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    # All of them are known before the first is replaced: a signal may come at once.
    known: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: how for number, how in known.items() if how is not signal.SIG_IGN}

    def note(number: int, _: object) -> None:
        signal.signal(number, before[number])
        stop.set()

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, how in before.items():
            signal.signal(number, how)


# What waits for a process or an operator, for ``idempotency_status``.

MAX_COUNTED: Final = 10_000
"""The most rows that a finding counts."""

NAMED: Final = 10
"""The most rows whose operations are named."""

PURGE_AGE: Final = timedelta(days=3)
"""How late a purge can be before that is a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Rows that wait, and what is wrong about that.

    Attributes:
        what: which rows: ``"outbox messages waiting"``. Programs may compare it.
        where: the database, topic or source that they are of.
        count: how many there are.
        oldest: how long the oldest of them has waited; ``None``: there is none.
        problem: what is wrong and what to do; empty: nothing.
        is_bounded: whether there may be more than ``count``, which is ``MAX_COUNTED`` then.
    """

    what: str
    where: str
    count: int = 0
    oldest: timedelta | None = None
    problem: str = ""
    is_bounded: bool = False


Source = Callable[[timedelta], Iterable[Finding]]
_sources: Final[list[Source]] = []


def register_health(source: Source) -> None:
    """Have the command ask the source, too.

    Args:
        source: finds, given how long something may wait for a process or a retry.
    """
    _sources.append(source)


def findings(max_age: timedelta) -> Iterator[Finding]:
    """Find what waits, in the databases of the stores and of the sources.

    Args:
        max_age: how long something may wait for a process or a retry.
    """
    for using in dict.fromkeys(store.using for store in stores.all() if store.using):
        yield from _keys(using, max_age)
    for source in _sources:
        yield from source(max_age)


def overdue(what: str, where: str, rows: QuerySet[Any]) -> Finding:
    """The finding of rows that a purge should have deleted."""
    return _finding(what, where, rows, "purge_at", "Run purge_idempotency_keys every hour.")


def _finding(what: str, where: str, rows: QuerySet[Any], since: str, problem: str) -> Finding:
    """The finding of rows, the oldest ones: ``MAX_COUNTED`` at most. Without any, nothing is wrong.

    Args:
        what: which rows.
        where: their database.
        rows: the rows.
        since: the column that says since when they wait. It has an index, which leads to them.
        problem: what is wrong if there are some.
    """
    dated = rows.order_by(since).values_list(since, DatabaseNow())
    waited = [now - then for then, now in dated[:MAX_COUNTED]]
    return Finding(
        what=what,
        where=where,
        count=len(waited),
        oldest=max(waited, default=None),
        problem=problem if waited else "",
        is_bounded=len(waited) == MAX_COUNTED,
    )


def _keys(using: str, max_age: timedelta) -> Iterator[Finding]:
    """The keys that no process finishes, found by the index of the leases."""
    rows, since = IdempotencyKey.objects.using(using), "lease_expires_at"
    problem = "Retries are refused until an operator completes or releases them in the admin."
    yield _finding("keys held", using, rows.held(), since, problem)
    late = DatabaseNow() - max_age
    interrupted = rows.filter(status=Status.IN_PROGRESS, hold=False, lease_expires_at__lte=late)
    found = _finding("keys interrupted", using, interrupted, since, "")
    if found.count:
        oldest = interrupted.order_by(since).values_list("operation", flat=True)[:NAMED]
        problem = (
            f"{', '.join(dict.fromkeys(oldest))}: the process was killed, or took longer than the "
            "max_duration of its policy, and no retry has arrived. Check what happened, and "
            "complete or release them in the admin."
        )
        found = replace(found, problem=problem)
    yield found
    yield overdue("keys to purge", using, rows.purgeable(PURGE_AGE))
