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
from .models import Heartbeat, MessageState
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
    beats = Heartbeat.objects.using(database()).order_by("beat_at")
    found: dict[str, list[tuple[str, timedelta]]] = {}
    for row in beats.annotate(now=DatabaseNow()):
        troubles, silence = found.setdefault(row.name, []), row.now - row.beat_at
        if silence > SILENCE:
            troubles.append((f"{row.process}: {_SILENT}", silence))
        elif row.hanging:
            troubles.append((f"{row.process} has handled {row.hanging} {_HANGS}", silence))
    for name, troubles in sorted(found.items()):
        yield Finding(
            what="processes silent",
            where=name,
            count=len(troubles),
            oldest=troubles[0][1] if troubles else None,
            problem=" ".join(text for text, _ in troubles[:NAMED]),
        )


_RELAY: Final = "run_messaging, and keep the topic in IDEMPOTENCY['OUTBOX']"
_PROCESS: Final = "run_messaging, and keep the receiver or the consumer with this source"
_SILENT: Final = (
    "it was killed, or it cannot reach the database. Start it again. If it is no longer needed, "
    "delete its row in the admin."
)
_HANGS: Final = (
    "for too long. Its stderr has the stacks of its threads. Restart it, and give the handler a "
    "timeout."
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
