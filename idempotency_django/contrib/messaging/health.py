"""Findings about messages that wait for a process or an operator."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Final

from django.core.exceptions import ImproperlyConfigured
from django.db.models import Count, Max, Min, Q

from ...management import PURGE_AGE, Finding, overdue, register_health
from ...models import DatabaseNow
from .databases import database
from .heartbeats import SILENCE
from .inbox import INBOX, known_sources
from .models import MessageState, RunningProcess
from .outbox.relay import OUTBOX
from .outbox.topics import OWN, topics
from .queue import Queue


def register_sources() -> None:
    """Have the command look at the outbox and the inbox."""
    register_health(outbox)
    register_health(inbox)
    register_health(processes)


def outbox(max_age: timedelta) -> Iterator[Finding]:
    """The messages of each topic that no relay sends, and the dead letters."""
    names = {*topics()} - {*OWN}
    yield from _waiting(OUTBOX, names, max_age, _RELAY)
    yield from _dead(OUTBOX, names, f"Their groups wait. {_MEND}")
    yield _stopped()
    yield overdue("outbox messages to purge", database(), OUTBOX.over(PURGE_AGE))


def inbox(max_age: timedelta) -> Iterator[Finding]:
    """The messages of each source without a process, and the messages that need an operator."""
    names = {*_sources()}
    yield from _waiting(INBOX, names, max_age, _PROCESS)
    yield from _dead(INBOX, names, _MEND)
    yield overdue("inbox messages to purge", database(), INBOX.over(PURGE_AGE))


def processes(_: timedelta) -> Iterator[Finding]:
    """The processes of each kind that hang, or have died."""
    rows = RunningProcess.objects.using(database()).order_by("beat_at")
    found: dict[str, list[tuple[str, timedelta]]] = {}
    for name, process, beat_at, now in rows.values_list(
        "name", "process", "beat_at", DatabaseNow()
    ):
        silent = found.setdefault(name, [])
        if now - beat_at > SILENCE:
            silent.append((process, now - beat_at))
    for name, silent in sorted(found.items()):
        named = ", ".join(process for process, _ in silent[:NAMED])
        yield Finding(
            what="processes silent",
            where=name,
            count=len(silent),
            oldest=silent[0][1] if silent else None,
            problem=f"{named}: {_SILENT}" if silent else "",
        )


_RELAY: Final = "run_messaging, and keep the topic in IDEMPOTENCY['OUTBOX']"
_PROCESS: Final = "run_messaging, and keep the receiver or the consumer with this source"
_SILENT: Final = (
    "it hangs, was killed, or cannot reach the database; see its log. Start it again. If it is no "
    "longer needed, delete its row in the admin."
)
_MEND: Final = (
    "They are not retried automatically. Fix the cause of their errors, then retry or discard "
    "them in the admin, or many of them with settle_messages."
)
_NONE: Final[tuple[int, timedelta | None]] = (0, None)


def _waiting(
    queue: Queue, names: Collection[str], max_age: timedelta, command: str
) -> Iterator[Finding]:
    """The pending messages of each topic or source: all of them, those set aside as well."""
    late = DatabaseNow() - max_age
    old = Q(**{f"{queue.since}__lte": late})
    waiting = _counted(queue, Q(state=MessageState.PENDING))
    due = _counted(queue, Q(state=MessageState.PENDING, process_after__lte=late))
    failing = Q(state=MessageState.PENDING, process_after__gt=late) & old & ~Q(error="")
    failed = _counted(queue, failing)
    for name in sorted({*names, *waiting}):
        count, oldest = waiting.get(name, _NONE)
        problems = []
        if name in due:
            problems.append(
                f"Overdue: {due[name][0]:,}. Run {command}. If it is running, see its log for the "
                "reason."
            )
        if name in failed:
            problems.append(
                f"Failed, to be retried: {failed[name][0]:,}, of {count:,} that wait. See their "
                "errors for the reason. If the broker is down, all of them wait for it."
            )
        yield Finding(
            what=f"{queue.name} messages waiting",
            where=name,
            count=count,
            oldest=oldest,
            problem=" ".join(problems),
        )


def _counted(queue: Queue, condition: Q) -> dict[str, tuple[int, timedelta | None]]:
    """The number of the rows and the age of the oldest, by topic or source."""
    # PostgreSQL's index has no others.
    rows = queue.all(database()).filter(condition, **{f"{queue.place}__gt": ""})
    grouped = rows.order_by().values_list(queue.place)
    counts = grouped.annotate(count=Count("*"), oldest=Min(queue.since), now=Max(DatabaseNow()))
    return {name: (count, now - oldest) for name, count, oldest, now in counts}


def _dead(queue: Queue, names: Collection[str], problem: str) -> Iterator[Finding]:
    """The dead letters of each topic or source."""
    found = _counted(queue, Q(state=MessageState.DEAD))
    for name in sorted({*names, *found}):
        count, oldest = found.get(name, _NONE)
        yield Finding(
            what=f"{queue.name} messages dead",
            where=name,
            count=count,
            oldest=oldest,
            problem=problem if count else "",
        )


SEARCH: Final = 1.0
"""Seconds for which groups are looked for whose first message was deleted."""
NAMED: Final = 5


def _stopped() -> Finding:
    """The groups whose first message was deleted, until a process goes on with them."""
    found, _ = OUTBOX.stopped(database(), seconds=SEARCH)
    names = ", ".join(map(repr, [*found][:NAMED]))
    return Finding(
        what="outbox groups stopped",
        where=database(),
        count=len(found),
        problem=f"Their first messages were deleted: {names}. run_messaging goes on."
        if found
        else "",
    )


def _sources() -> list[str]:
    try:
        return known_sources()
    except ImproperlyConfigured:  # a check says so
        return []
