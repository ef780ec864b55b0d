"""The sources of messages for timelines: those of the inbox and of the outbox.

A message is referred to by its id and a scope of its own: ``outbox:<topic>``, ``inbox:<source>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...stores import reference
from ..timeline import Entry, Member, Source, entry, register
from .databases import database
from .inbox import INBOX
from .models import InboxMessage, MessageState, OutboxMessage
from .outbox.relay import OUTBOX
from .queue import Queue


class Messages(Source):
    """The messages of one table, in the database of messaging.

    Attributes:
        queue: the table as a queue.
        title: what is done, for people.
        begun: the coming of a message, for people.
        until: the column that says when it was done.
    """

    queue: ClassVar[Queue]
    title: ClassVar[Any]
    begun: ClassVar[Any]
    until: ClassVar[str]

    @classmethod
    def everywhere(cls) -> Iterable[Source]:
        return [cls(database())]

    def find(self, name: str, scope: str | None) -> Iterable[Member]:
        rows = self.rows().filter(message_id=name)
        if scope is not None:
            kind, _sign, place = scope.partition(":")
            rows = (
                rows.filter(**{self.queue.place: place}) if kind == self.queue.name else rows.none()
            )
        return self.members(rows)

    def member(self, row: Any) -> Member:
        place = getattr(row, self.queue.place)
        return Member(
            kind=f"{self.queue.name} message",
            reference=reference(row.message_id, f"{self.queue.name}:{place}"),
            where=self.using,
            title=self.title % {"type": row.type, "place": place},
            state=row.get_state_display(),
            caused_by=row.caused_by,
            since=getattr(row, self.queue.since),
            row=row,
            source=self,
        )

    def moments(self, member: Member) -> Iterator[Entry]:
        row = member.row
        yield entry(member, self.begun, getattr(row, self.queue.since))
        if until := getattr(row, self.until):
            yield entry(member, member.state, until)
        elif row.state == MessageState.PENDING and row.process_after:
            yield entry(member, _("due"), row.process_after)


@register
class OutboxMessages(Messages):
    """A message of the outbox names the operation that published it."""

    queue = OUTBOX
    model = OutboxMessage
    deferred = ("payload", "error")
    title = gettext_lazy("%(type)s to %(place)s")
    begun = gettext_lazy("published to the outbox")
    until = "sent_at"


@register
class InboxMessages(Messages):
    """A message of the inbox comes from outside, unless it is a dead letter of a consumer.

    That one names the record of the attempts at it, or what its event names as its cause if no
    handler was called.
    """

    queue = INBOX
    model = InboxMessage
    deferred = ("body", "headers", "error")
    title = gettext_lazy("%(type)s from %(place)s")
    begun = gettext_lazy("received")
    until = "processed_at"
