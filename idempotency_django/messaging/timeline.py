"""The source of messages for timelines: those of the inbox and of the outbox.

A message is referred to by its id and a scope of its own: ``outbox:<topic>``, ``inbox:<source>``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final
from urllib.parse import unquote

from django.core.exceptions import ImproperlyConfigured
from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..errors import UnknownEventType
from ..models import DatabaseNow
from ..policy import keys, scopes
from ..records import reference, referred
from ..timeline import UNREACHABLE, Confidential, Entry, Member, logged, register
from .databases import database
from .dead_letters import SENDER, message_id_of
from .events import Event
from .models import InboxMessage, MessageState, OutboxMessage
from .outbox.publishing import topic

OUTBOX: Final = "outbox:"
INBOX: Final = "inbox:"
CONSUMER: Final = "consumer:"
"""What the scopes of messages begin with, and the source of a consumer's dead letter."""

_CONTENTS: Final = ("headers", "error")


class MessageSource:
    """The messages of the inbox and of the outbox, in the database of messaging.

    A message of the outbox names the operation that published it. A dead letter of a consumer
    belongs to the record of the attempts at it, or to what its event names as its cause if no
    handler was called. Other messages of the inbox come from outside.
    """

    def by_name(self, name: str, scope: str | None, unreachable: set[str]) -> Iterable[Member]:
        if scope is not None:
            yield from self.by_reference(reference(name, scope), unreachable)
            return
        yield from self._found(_outbox().filter(message_id=name), unreachable)
        yield from self._found(_inbox().filter(message_id=name), unreachable)

    def by_reference(self, reference: str, unreachable: set[str]) -> Iterable[Member]:
        message_id, scope = referred(reference)
        if scope.startswith(OUTBOX):
            name = scope.removeprefix(OUTBOX)
            rows: QuerySet[Any] = _outbox().filter(message_id=message_id, topic=name)
        elif scope.startswith(INBOX):
            source = scope.removeprefix(INBOX)
            rows = _inbox().filter(message_id=message_id, source=source)
        else:
            return
        yield from self._found(rows, unreachable)

    def of(self, row: Any) -> Member | None:
        if not isinstance(row, InboxMessage | OutboxMessage):
            return None
        rows = _inbox() if isinstance(row, InboxMessage) else _outbox()
        return next(iter(self._members(rows.using(row._state.db).filter(pk=row.pk))), None)

    def caused_by(
        self, members: Collection[Member], limit: int, unreachable: set[str]
    ) -> Iterable[Member]:
        references = [member.reference for member in members]
        published = _outbox().filter(~Q(caused_by=""), caused_by__in=references).order_by("pk")
        yield from self._found(published[:limit], unreachable)
        dead = _dead_letters_of(members)
        if dead is not None:
            for member in self._found(dead.order_by("pk")[:limit], unreachable):
                if member.caused_by in references:
                    yield member

    def entries(self, members: Sequence[Member], shown: Confidential) -> Iterable[Entry]:
        for kind, moments in ((OutboxMessage, _sent), (InboxMessage, _received)):
            of_kind = [member for member in members if isinstance(member.row, kind)]
            for member in of_kind:
                yield from moments(member)
            yield from logged(of_kind)

    def _found(self, rows: QuerySet[Any], unreachable: set[str]) -> list[Member]:
        try:
            return self._members(rows)
        except UNREACHABLE:
            unreachable.add(f"database {rows.db!r}")
            return []

    def _members(self, rows: QuerySet[Any]) -> list[Member]:
        found = list(rows)
        dead = [row.pk for row in found if _is_of_consumer(row)]
        causes = _attempts(dead, rows.db) if dead else {}
        return [self._member(row, causes.get(row.pk, "")) for row in found]

    def _member(self, row: Any, cause: str) -> Member:
        common = {"state": row.get_state_display(), "where": row._state.db, "row": row}
        if isinstance(row, OutboxMessage):
            return Member(
                kind="outbox message",
                reference=reference(row.message_id, f"{OUTBOX}{row.topic}"),
                title=_("%(type)s to %(topic)s") % {"type": row.type, "topic": row.topic},
                caused_by=row.caused_by,
                since=row.created_at,
                source=self,
                **common,
            )
        return Member(
            kind="inbox message",
            reference=reference(row.message_id, f"{INBOX}{row.source}"),
            title=_("%(type)s from %(source)s") % {"type": row.type, "source": row.source},
            caused_by=cause,
            since=row.received_at,
            source=self,
            **common,
        )


def register_messages() -> None:
    """Have timelines include the messages of the inbox and of the outbox."""
    register(MessageSource())


def _outbox() -> QuerySet[Any]:
    rows: QuerySet[Any] = OutboxMessage.objects.using(database()).annotate(now=DatabaseNow())
    return rows.defer("payload", *_CONTENTS)


def _inbox() -> QuerySet[Any]:
    rows: QuerySet[Any] = InboxMessage.objects.using(database()).annotate(now=DatabaseNow())
    return rows.defer("body", *_CONTENTS)


def _sent(member: Member) -> Iterator[Entry]:
    row = member.row
    yield _entry(member, _("published to the outbox"), row.created_at)
    if row.sent_at:
        yield _entry(member, _in_attempt(_("sent"), row.attempts), row.sent_at)
    elif row.state == MessageState.PENDING:
        yield from _waiting(member)
    else:
        yield _standing(member)
    if row.dedup_until:
        yield _entry(member, _("deduplication window ends"), row.dedup_until)
    if row.purge_at:
        yield _entry(member, _("may be purged"), row.purge_at)


def _received(member: Member) -> Iterator[Entry]:
    row = member.row
    dead = _is_of_consumer(row)
    what = _("dead-lettered by its consumer") if dead else _("received")
    yield _entry(member, what, row.received_at)
    if row.processed_at:
        yield _entry(member, _in_attempt(row.get_state_display(), row.attempts), row.processed_at)
    elif row.state == MessageState.PENDING:
        yield from _waiting(member)
    elif not dead:
        yield _standing(member)
    if row.purge_at:
        yield _entry(member, _("may be purged"), row.purge_at)


def _waiting(member: Member) -> Iterator[Entry]:
    row = member.row
    if row.process_after:
        yield _entry(member, _tried(row.attempts), row.process_after)


def _entry(member: Member, what: str, at: Any) -> Entry:
    return Entry(at=at, now=member.row.now, what=what, member=member)


def _standing(member: Member) -> Entry:
    """The state that it is in. Only of a suspect, which is dead as it comes in, a column says since
    when.
    """
    row = member.row
    what = _("is %(state)s") % {"state": row.get_state_display()}
    if row.attempts:
        what = ngettext(
            "is %(state)s, after %(count)d attempt",
            "is %(state)s, after %(count)d attempts",
            row.attempts,
        ) % {"state": row.get_state_display(), "count": row.attempts}
    if getattr(row, "is_suspect", False) and row.state == MessageState.DEAD:
        return _entry(member, what, row.received_at)
    return Entry(at=None, now=row.now, what=what, member=member, timed=False)


def _in_attempt(what: str, attempts: int) -> str:
    if attempts <= 1:
        return str(what)
    return _("%(what)s in attempt %(attempts)d") % {"what": what, "attempts": attempts}


def _tried(attempts: int) -> str:
    if not attempts:
        return _("due")
    return ngettext(
        "due again, after %(count)d attempt", "due again, after %(count)d attempts", attempts
    ) % {"count": attempts}


def _is_of_consumer(row: Any) -> bool:
    return isinstance(row, InboxMessage) and row.source.startswith(CONSUMER)


def _dead_letters_of(members: Iterable[Member]) -> QuerySet[Any] | None:
    """The dead letters that consumers may have kept: after the attempts that these are the records
    of, or because they have no handler for these messages of the outbox.
    """
    ids = set()
    for member in members:
        if member.scope.startswith(CONSUMER):
            source = member.scope.removeprefix(CONSUMER).partition(":")[2]
            ids.add(message_id_of(unquote(source.partition("|")[0]), member.key))
        elif member.scope.startswith(OUTBOX):
            ids.add(message_id_of(_source_of(member.scope.removeprefix(OUTBOX)), member.key))
    of_consumers = {"source__gt": CONSUMER, "source__lt": "consumer;"}  # a range of the index
    return _inbox().filter(**of_consumers, message_id__in=ids) if ids else None


def _source_of(topic_name: str) -> str:
    """The source of the topic's events."""
    try:
        return topic(topic_name).source or f"/{topic_name}"
    except ImproperlyConfigured:  # the topic was removed
        return f"/{topic_name}"


def _attempts(pks: Sequence[Any], using: str) -> dict[Any, str]:
    """The references of what caused the dead letters of consumers: the records of the attempts,
    or what the event names where no handler was called.
    """
    rows = InboxMessage.objects.using(using).filter(pk__in=pks)
    columns = ("pk", "source", "headers", "error", "body")
    return {pk: _attempted(*parts) for pk, *parts in rows.values_list(*columns)}


def _attempted(source: str, headers: str, error: str, body: bytes) -> str:
    try:
        event = Event.from_json(bytes(body))
    except ValueError:  # what came was no event
        return ""
    senders = [f"sender:{value}" for name, value in json.loads(headers) if name == SENDER]
    if error.startswith(UnknownEventType.__name__):  # it was not tried, so there is no record
        return "" if senders else event.caused_by  # a stranger may name any cause
    scope = [f"{source}:{event.source}", *senders]
    return reference(keys.fit(event.id), scopes.fit(scopes.join(*scope)))
