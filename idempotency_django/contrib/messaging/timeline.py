"""The sources of messages for timelines: those of the inbox and of the outbox.

A message is referred to by its id and a scope of its own: ``outbox:<topic>``, ``inbox:<source>``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, ClassVar

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...stores import reference
from ..timeline import Entry, Member, Source, entry, register
from .databases import database
from .models import InboxMessage, MessageState, OutboxMessage


class Messages(Source):
    """The messages of one table, in the database of messaging.

    Attributes:
        kind: what its members are.
        prefix: what their scopes begin with.
        place: the column that follows in the scope.
        title: what is done, for people.
        begun: the coming of a message, for people.
        since: the column that says when it came.
        until: the column that says when it was done.
    """

    kind: ClassVar[str]
    prefix: ClassVar[str]
    place: ClassVar[str]
    title: ClassVar[Any]
    begun: ClassVar[Any]
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

    def member(self, row: Any) -> Member:
        place = getattr(row, self.place)
        return Member(
            kind=self.kind,
            reference=reference(row.message_id, f"{self.prefix}{place}"),
            where=self.using,
            title=self.title % {"type": row.type, "place": place},
            state=row.get_state_display(),
            caused_by=row.caused_by,
            since=getattr(row, self.since),
            row=row,
            source=self,
        )

    def moments(self, member: Member) -> Iterator[Entry]:
        row = member.row
        yield entry(member, self.begun, member.since)
        if until := getattr(row, self.until):
            yield entry(member, member.state, until)
        elif row.state != MessageState.PENDING:  # no column says since when
            yield entry(member, member.state, None, timed=False)
        elif row.process_after:
            yield entry(member, _("due"), row.process_after)


@register
class OutboxMessages(Messages):
    """A message of the outbox names the operation that published it."""

    model = OutboxMessage
    deferred = ("payload", "error")
    kind = "outbox message"
    prefix = "outbox:"
    place = "topic"
    title = gettext_lazy("%(type)s to %(place)s")
    begun = gettext_lazy("published to the outbox")
    since = "created_at"
    until = "sent_at"


@register
class InboxMessages(Messages):
    """A message of the inbox comes from outside, unless it is a dead letter of a consumer.

    That one names the record of the attempts at it, or what its event names as its cause if no
    handler was called.
    """

    model = InboxMessage
    deferred = ("body", "headers", "error")
    kind = "inbox message"
    prefix = "inbox:"
    place = "source"
    title = gettext_lazy("%(type)s from %(place)s")
    begun = gettext_lazy("received")
    since = "received_at"
    until = "processed_at"

    def effects(self, members: Collection[Member], limit: int) -> Iterable[Member]:
        """Consumers and messages cause dead letters; nothing else does."""
        causes = [each for each in members if each.scope.startswith(("consumer:", "outbox:"))]
        return super().effects(causes, limit)
