"""Findings about messages that wait for a process or an operator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any, Final
from urllib.parse import unquote

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Count, Max, Min, Q, QuerySet

from ...management import Finding, Limits, Names, overdue, register_health
from ...models import DatabaseNow
from .consumers import consumers
from .databases import database
from .dead_letters import message_id_of
from .heartbeats import SILENCE
from .inbox.processing import CONSUMER, INBOX, known_sources
from .inbox.receivers import receiver_of
from .models import Heartbeat, InboxMessage, MessageState, OutboxMessage
from .outbox.relay import OUTBOX
from .outbox.topics import OWN, has_topic, topic, topics
from .queue import Queue


def register_sources() -> None:
    """Have the command and the check look at the outbox and the inbox."""
    register_health("outbox", database, outbox, _of_outbox)
    register_health("inbox", database, inbox, _of_inbox)
    register_health("processes", database, processes, lambda _: ())


def outbox(limits: Limits) -> Iterator[Finding]:
    """The messages of each topic that no relay sends, and the dead letters."""
    idle = f"Run relay_outbox, for this topic too. {_LOGGED}"
    names = {*topics()} - {*OWN}
    yield from _waiting(OUTBOX, names, limits, _no_relay, idle)
    dead = OUTBOX.all(database()).filter(state=MessageState.DEAD)
    yield from _dead("outbox messages dead", OUTBOX, dead, names, f"Their groups wait. {_MEND}")
    yield _stopped(OUTBOX, "relay_outbox")
    yield overdue("outbox messages to purge", database(), OUTBOX.over(limits.purge_age))


def inbox(limits: Limits) -> Iterator[Finding]:
    """The messages of each source without a process, and the messages that need an operator."""
    idle = f"Run process_inbox, for this source too. {_LOGGED}"
    names = {*_sources()}
    yield from _waiting(INBOX, names, limits, _no_receiver, idle)
    dead = INBOX.all(database()).filter(state=MessageState.DEAD)
    for what, rows, problem in (
        ("inbox messages dead", dead.filter(is_suspect=False), _MEND),
        ("inbox messages to accept", dead.filter(is_suspect=True), _ACCEPT),
    ):
        yield from _dead(what, INBOX, rows, names, problem)
    yield _stopped(INBOX, "process_inbox")
    yield overdue("inbox messages to purge", database(), INBOX.over(limits.purge_age))


def processes(_: Limits) -> Iterator[Finding]:
    """The processes of each kind that have given no sign of life, though none ended them."""
    beats = Heartbeat.objects.using(database()).order_by("beat_at")
    columns = ("name", "process", "beat_at", DatabaseNow())
    silent: dict[str, list[tuple[str, timedelta]]] = {}
    for name, process, beat_at, now in beats.values_list(*columns):
        known = silent.setdefault(name, [])
        if now - beat_at > SILENCE:
            known.append((process, now - beat_at))
    for name, found in sorted(silent.items()):
        problem = f"{'; '.join(process for process, _ in found[:NAMED])}: {_SILENT}"
        yield Finding(
            what="processes silent",
            where=name,
            count=len(found),
            oldest=found[0][1] if found else None,
            problem=problem if found else "",
        )


def _of_outbox(held: Names) -> Names:
    """The records by which the consumers of a local topic have made its messages dead letters."""
    of_consumers = [(key, scope) for key, scope in held if scope.startswith(CONSUMER)]
    rows = _settled(OutboxMessage, [key for key, _ in of_consumers])
    dead = {key for key, name in rows.values_list("message_id", "topic") if _is_local(name)}
    return [(key, scope) for key, scope in of_consumers if key in dead]


def _of_inbox(held: Names) -> Names:
    """The records of webhooks, and those of the events that consumers have kept as dead letters."""
    by_message = {}
    for key, scope in held:
        kind, _, source = scope.partition(":")
        if kind == "webhook":
            by_message[source, key] = (key, scope)
        elif scope.startswith(CONSUMER):
            consumer, _, origin = source.partition(":")
            message_id = message_id_of(unquote(origin.partition("|")[0]), key)
            by_message[f"{CONSUMER}{consumer}", message_id] = (key, scope)
    rows = _settled(InboxMessage, [message_id for _, message_id in by_message])
    of_sources = rows.filter(source__in={source for source, _ in by_message})  # for the index
    settled = of_sources.values_list("source", "message_id")
    return [by_message[each] for each in settled if each in by_message]


def _settled(model: type[Any], ids: list[str]) -> QuerySet[Any]:
    """Which of the messages wait for an operator, or are discarded."""
    rows: QuerySet[Any] = model._default_manager.using(database())
    return rows.filter(message_id__in=ids, state__in=[MessageState.DEAD, MessageState.DISCARDED])


def _is_local(name: str) -> bool:
    try:
        return topic(name).is_local
    except ImproperlyConfigured:  # its line says so
        return False


_SILENT: Final = (
    "it was killed, or a handler hangs in it, or it cannot reach the database. Start it again. If "
    "it is no longer needed, delete its row in the admin."
)
_LOGGED: Final = "If it is running, see its log for the reason."
_MEND: Final = (
    "They are not retried automatically. Fix the cause of their errors, then retry or discard "
    "them in the admin, or many of them with settle_messages."
)
_ACCEPT: Final = (
    "Check with the sender whether they are genuine. Accept genuine messages, and discard the "
    "others."
)


def _waiting(
    queue: Queue,
    names: Collection[str],
    limits: Limits,
    unknown: Callable[[str], str],
    idle: str,
) -> Iterator[Finding]:
    """The pending messages of each topic or source: all of them, those set aside as well."""
    pending = queue.all(database()).filter(state=MessageState.PENDING)
    late = DatabaseNow() - limits.max_age
    due = pending.filter(process_after__lte=late)
    failing = pending.filter(~Q(error=""), process_after__gt=late, **{f"{queue.since}__lte": late})
    waiting, late_ones, failed = (_counted(queue, each) for each in (pending, due, failing))
    for name in sorted({*names, *waiting}):
        count, oldest = waiting.get(name, NONE)
        problems = [unknown(name)] if count and unknown(name) else []
        if name in late_ones and not problems:
            problems.append(f"Overdue: {late_ones[name][0]:,}. {idle}")
        is_idle = bool(problems)
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
            idle=is_idle,
        )


NONE: Final[tuple[int, timedelta | None]] = (0, None)


def _counted(queue: Queue, rows: QuerySet[Any]) -> dict[str, tuple[int, timedelta | None]]:
    """The number of the rows and the age of the oldest, by topic or source."""
    named = rows.filter(**{f"{queue.place}__gt": ""})  # for PostgreSQL's index, which has no others
    grouped = named.order_by().values_list(queue.place)
    counts = grouped.annotate(count=Count("*"), oldest=Min(queue.since), now=Max(DatabaseNow()))
    return {name: (count, now - oldest) for name, count, oldest, now in counts}


def _dead(
    what: str, queue: Queue, rows: QuerySet[Any], names: Collection[str], problem: str
) -> Iterator[Finding]:
    found = _counted(queue, rows)
    for name in sorted({*names, *found}):
        count, oldest = found.get(name, NONE)
        yield Finding(
            what=what, where=name, count=count, oldest=oldest, problem=problem if count else ""
        )


def _stopped(queue: Queue, command: str) -> Finding:
    """The groups whose first message was deleted, until a process goes on with them."""
    found, _ = queue.stopped(database(), seconds=SEARCH)
    names = ", ".join(map(repr, [*found][:NAMED]))
    return Finding(
        what=f"{queue.name} groups stopped",
        where=database(),
        count=len(found),
        problem=f"Their first messages were deleted: {names}. {command} goes on." if found else "",
        idle=bool(found),
    )


SEARCH: Final = 1.0
"""Seconds for which such groups are looked for."""
NAMED: Final = 5


def _sources() -> list[str]:
    try:
        return known_sources() if getattr(settings, "ROOT_URLCONF", None) else []
    except ImproperlyConfigured:  # the line of its messages says so
        return []


def _no_relay(name: str) -> str:
    """The reason why no relay sends the topic; empty: one does, if it runs."""
    if has_topic(name):
        return ""
    return (
        "The topic is not in IDEMPOTENCY['OUTBOX'], so no relay sends them. If it was renamed, "
        "restore the old name until they are sent."
    )


def _no_receiver(source: str) -> str:
    """The reason why no process handles the source; empty: one does, if it runs."""
    if source.startswith(CONSUMER):
        try:
            known = source.removeprefix(CONSUMER) in consumers()
        except ImproperlyConfigured as error:
            return str(error)
        return "" if known else "No consumer in IDEMPOTENCY['CONSUMERS'] has this name. Restore it."
    if getattr(settings, "ROOT_URLCONF", None) and receiver_of(source):
        return ""
    return (
        "No WebhookReceiver in the URLconf has this source. If it was renamed, restore the old "
        "source."
    )
