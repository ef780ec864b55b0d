"""The sources of messages for timelines: those of the inbox and of the outbox.

A message is referred to by its id and a scope of its own: ``outbox:<topic>``, ``inbox:<source>``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any, ClassVar, Final
from urllib.parse import unquote

from django.core.exceptions import ImproperlyConfigured
from django.db.models import QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ...policy import keys, scopes
from ...stores import reference
from ..timeline import Entry, Member, Source, entry, register
from .databases import database
from .dead_letters import SENDER, message_id_of
from .errors import UnknownEventType
from .events import Event
from .models import InboxMessage, MessageState, OutboxMessage
from .outbox.topics import topic

OUTBOX: Final = "outbox:"
INBOX: Final = "inbox:"
CONSUMER: Final = "consumer:"
"""The prefixes of the scopes of messages, and of the source of a consumer's dead letter."""


class Messages(Source):
    """The messages of one table, in the database of messaging.

    Attributes:
        kind: what its members are.
        prefix: what their scopes begin with.
        place: the column that follows in the scope.
        title: what is done, for people.
        since: the column that says when a message came.
        until: the column that says when it was done.
    """

    kind: ClassVar[str]
    prefix: ClassVar[str]
    place: ClassVar[str]
    title: ClassVar[Any]
    since: ClassVar[str]
    until: ClassVar[str]

    @classmethod
    def everywhere(cls) -> Iterable[Source]:
        return [cls(database())]

    def find(self, name: str, scope: str | None) -> Iterable[Member]:
        rows = self.rows().filter(message_id=name)
        if scope is None:
            return self.members(rows)
        if not scope.startswith(self.prefix):
            return ()
        return self.members(rows.filter(**{self.place: scope.removeprefix(self.prefix)}))

    def member(self, row: Any, cause: str = "") -> Member:
        place = getattr(row, self.place)
        return Member(
            kind=self.kind,
            reference=reference(row.message_id, f"{self.prefix}{place}"),
            where=self.using,
            title=self.title % {"type": row.type, "place": place},
            state=row.get_state_display(),
            caused_by=cause or getattr(row, "caused_by", ""),
            since=getattr(row, self.since),
            row=row,
            source=self,
        )

    def moments(self, member: Member) -> Iterator[Entry]:
        row = member.row
        begun, done = self.words(row)
        yield entry(member, begun, member.since)
        until = getattr(row, self.until)
        if until:
            if row.attempts > 1:
                values = {"what": done, "attempts": row.attempts}
                done = _("%(what)s in attempt %(attempts)d") % values
            yield entry(member, done, until)
        elif row.state == MessageState.PENDING:
            if row.process_after:
                due = _after(_("due again"), row.attempts) if row.attempts else _("due")
                yield entry(member, due, row.process_after)
        elif not _is_of_consumer(row):
            yield self._standing(member)
        if getattr(row, "dedup_until", None):
            yield entry(member, _("deduplication window ends"), row.dedup_until)
        if row.purge_at:
            yield entry(member, _("may be purged"), row.purge_at)

    def words(self, row: Any) -> tuple[str, str]:
        """The words for the coming of a message, and for its end."""
        raise NotImplementedError

    def _standing(self, member: Member) -> Entry:
        """The state that it is in. Only of a suspect, which is dead as it comes in, a column says
        since when.
        """
        row = member.row
        what = _after(_("is %(state)s") % {"state": member.state}, row.attempts)
        if row.is_suspect and row.state == MessageState.DEAD:
            return entry(member, what, member.since)
        return entry(member, what, None, timed=False)


@register
class OutboxMessages(Messages):
    """A message of the outbox names the operation that published it."""

    model = OutboxMessage
    deferred = ("payload", "headers", "error")
    kind = "outbox message"
    prefix = OUTBOX
    place = "topic"
    title = gettext_lazy("%(type)s to %(place)s")
    since = "created_at"
    until = "sent_at"

    def words(self, row: Any) -> tuple[str, str]:
        return _("published to the outbox"), _("sent")


@register
class InboxMessages(Messages):
    """A message of the inbox comes from outside, unless it is a dead letter of a consumer.

    That one belongs to the record of the attempts at it, or to what its event names as its cause if
    no handler was called.
    """

    model = InboxMessage
    deferred = ("body", "headers", "error")
    kind = "inbox message"
    prefix = INBOX
    place = "source"
    title = gettext_lazy("%(type)s from %(place)s")
    since = "received_at"
    until = "processed_at"

    def words(self, row: Any) -> tuple[str, str]:
        of_consumer = _is_of_consumer(row)
        begun = _("dead-lettered by its consumer") if of_consumer else _("received")
        return begun, row.get_state_display()

    def members(self, rows: QuerySet[Any]) -> Iterator[Member]:
        found = list(rows)
        dead = [row.pk for row in found if _is_of_consumer(row)]
        causes: dict[Any, str] = {}
        if dead:
            columns = ("pk", "source", "headers", "error", "body")
            letters = InboxMessage.objects.using(self.using).filter(pk__in=dead)
            causes = {pk: _attempted(*parts) for pk, *parts in letters.values_list(*columns)}
        return (self.member(row, causes.get(row.pk, "")) for row in found)

    def effects(self, members: Collection[Member], limit: int) -> Iterable[Member]:
        """The dead letters that consumers have kept: after the attempts that these are the records
        of, or because they have no handler for these messages of the outbox.
        """
        ids, references = set(), {member.reference for member in members}
        for member in members:
            if member.scope.startswith(CONSUMER):
                source = member.scope.removeprefix(CONSUMER).partition(":")[2]
                ids.add(message_id_of(unquote(source.partition("|")[0]), member.key))
            elif member.scope.startswith(OUTBOX):
                ids.add(message_id_of(_source_of(member.scope.removeprefix(OUTBOX)), member.key))
        if not ids:
            return []
        of_consumers = {"source__gt": CONSUMER, "source__lt": "consumer;"}  # a range of the index
        letters = self.members(self.rows().filter(**of_consumers, message_id__in=ids)[:limit])
        return [letter for letter in letters if letter.caused_by in references]


def _after(what: str, attempts: int) -> str:
    if not attempts:
        return what
    return ngettext(
        "%(what)s, after %(count)d attempt", "%(what)s, after %(count)d attempts", attempts
    ) % {"what": what, "count": attempts}


def _is_of_consumer(row: Any) -> bool:
    return isinstance(row, InboxMessage) and row.source.startswith(CONSUMER)


def _source_of(topic_name: str) -> str:
    """The source of the topic's events."""
    try:
        return topic(topic_name).source or f"/{topic_name}"
    except ImproperlyConfigured:  # the topic was removed
        return f"/{topic_name}"


def _attempted(source: str, headers: str, error: str, body: bytes) -> str:
    """The reference of what caused the dead letter of a consumer."""
    try:
        event = Event.from_json(bytes(body))
    except ValueError:  # the message was not an event
        return ""
    senders = [f"sender:{value}" for name, value in json.loads(headers) if name == SENDER]
    if error.startswith(UnknownEventType.__name__):  # there was no attempt, so there is no record
        return "" if senders else event.caused_by  # a stranger may name any cause
    scope = [f"{source}:{event.source}", *senders]
    return reference(keys.fit(event.id), scopes.fit(scopes.join(*scope)))
