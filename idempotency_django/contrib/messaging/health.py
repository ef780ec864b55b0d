"""Findings about messages that wait for a process or an operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final
from urllib.parse import unquote

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Q, QuerySet

from ...models import DatabaseNow
from ...stores import MAX_COUNTED, Finding, Limits, Names, finding_of, overdue, register_health
from .consumers import consumers
from .databases import database
from .dead_letters import message_id_of
from .inbox.handling import CONSUMER
from .inbox.processing import INBOX
from .inbox.receivers import receiver_of
from .models import InboxMessage, MessageState, OutboxMessage
from .outbox.relay import OUTBOX
from .outbox.topics import topic

Pending = tuple[timedelta, timedelta, bool]
"""How long a message has been due (negative: not yet), its age, and whether it failed."""


def register_sources() -> None:
    """Have the command and the check look at the outbox and the inbox."""
    register_health("outbox", database, outbox, _of_outbox)
    register_health("inbox", database, inbox, _of_inbox)


def outbox(limits: Limits) -> Iterator[Finding]:
    """The messages of each topic that no relay sends, and the dead letters."""
    rows = OutboxMessage.objects.using(database())
    for name, pending in _pending(rows, "topic", "created_at"):
        idle = (
            f"Run relay_outbox, for this topic too. {_LOGGED} Or an earlier message of the group "
            "is a dead letter."
        )
        yield _waiting("outbox messages waiting", name, pending, limits, _no_relay, idle)
    for name, waited in _dead(rows, "topic", "created_at"):
        yield finding_of("outbox messages dead", name, waited, f"Their groups wait. {_MEND}")
    yield overdue("outbox messages to purge", database(), OUTBOX.over(limits.purge_age))


def inbox(limits: Limits) -> Iterator[Finding]:
    """The messages of each source without a process, and the messages that need an operator."""
    rows = InboxMessage.objects.using(database())
    for name, pending in _pending(rows, "source", "received_at"):
        idle = (
            f"Run process_inbox, for this source too. {_LOGGED} Or an earlier message of the "
            "group is a dead letter."
        )
        yield _waiting("inbox messages waiting", name, pending, limits, _no_receiver, idle)
    for what, dead, problem in (
        ("inbox messages dead", rows.filter(is_suspect=False), _MEND),
        ("inbox messages to accept", rows.filter(is_suspect=True), _ACCEPT),
    ):
        for name, waited in _dead(dead, "source", "received_at"):
            yield finding_of(what, name, waited, problem)
    yield overdue("inbox messages to purge", database(), INBOX.over(limits.purge_age))


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


_LOGGED: Final = "If it is running, see its log for the reason."
_MEND: Final = (
    "They are not retried automatically. Fix the cause of their errors, then retry or discard "
    "them in the admin."
)
_ACCEPT: Final = (
    "Check with the sender whether they are genuine. Accept genuine messages, and discard the "
    "others."
)


def _pending(rows: QuerySet[Any], by: str, since: str) -> Iterator[tuple[str, list[Pending]]]:
    """The messages that are to be sent or handled, by topic or source; the longest due ones."""
    waiting = rows.filter(state="pending", process_after__isnull=False).order_by("process_after")
    dated = waiting.annotate(failed=~Q(error=""), now=DatabaseNow())
    columns = dated.values_list(by, "process_after", since, "failed", "now")
    by_name: dict[str, list[Pending]] = defaultdict(list)
    for name, process_after, created, failed, now in columns[:MAX_COUNTED]:
        by_name[name].append((now - process_after, now - created, failed))
    yield from sorted(by_name.items())


def _waiting(
    what: str,
    where: str,
    pending: list[Pending],
    limits: Limits,
    unknown: Callable[[str], str],
    idle: str,
) -> Finding:
    late = sum(due > limits.max_age for due, _, _ in pending)
    failing = sum(failed and age > limits.max_age >= due for due, age, failed in pending)
    problems = [unknown(where)] if unknown(where) else []
    if late and not problems:
        problems.append(f"Overdue: {late}. {idle}")
    if failing:
        problems.append(f"Failed, to be retried: {failing}. See their errors for the reason.")
    waited = [age for _, age, _ in pending]
    return finding_of(what, where, waited, " ".join(problems), idle=len(problems) > bool(failing))


def _no_relay(name: str) -> str:
    """The reason why no relay sends the topic; empty: one does, if it runs."""
    try:
        known = topic(name)
    except ImproperlyConfigured:
        return (
            "The topic is not in IDEMPOTENCY['OUTBOX'], so no relay sends them. If it was "
            "renamed, restore the old name until they are sent."
        )
    return "" if known.relay else "The topic has RELAY=False now, so no relay sends them."


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


def _dead(rows: QuerySet[Any], by: str, since: str) -> Iterator[tuple[str, list[timedelta]]]:
    """The ages of the dead letters, by topic or source."""
    by_name: dict[str, list[timedelta]] = defaultdict(list)
    columns = rows.filter(state=MessageState.DEAD).values_list(by, since, DatabaseNow())
    for name, created, now in columns[:MAX_COUNTED]:
        by_name[name].append(now - created)
    yield from sorted(by_name.items())
