"""Deleting what was sent, and the numbers of groups that have nothing left."""

from __future__ import annotations

from datetime import timedelta

from django.db import connections, transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from ...models import DatabaseNow
from ...stores import purging
from ..databases import database
from ..models import OutboxMessage, OutboxStream
from .relay import OUTBOX


def register_purges() -> None:
    """Have the command and the task purge the outbox."""
    purging.register("outbox messages", purge_messages, purgeable_messages)
    purging.register("outbox groups", purge_streams, purgeable_streams)


def purgeable_messages(older_than: timedelta) -> int:
    """How many messages were kept for that much longer than they must."""
    return over(older_than).count()


def purge_messages(older_than: timedelta, limit: int) -> int:
    """Delete up to that many of them, the oldest first; how many there were.

    What is pending or dead is kept, and what a window of deduplication still needs.
    """
    using = database()
    with transaction.atomic(using=using):
        oldest = over(older_than).order_by("purge_at", "pk")
        keys = oldest.select_for_update(skip_locked=_can_skip(using)).values_list("pk", flat=True)
        rows = OutboxMessage.objects.using(using).filter(pk__in=list(keys[:limit]))
        return rows.delete()[0]


def purgeable_streams(_: timedelta) -> int:
    """How many numbers there are of groups without any message."""
    return _empty(database()).count()


def purge_streams(_: timedelta, limit: int) -> int:
    """Delete up to that many numbers of groups without any message; how many there were.

    Nobody knows since when a group has none. The next message of such a group has the number 1
    again. A group's last message keeps its number for as long as it is kept itself. Groups go on
    whose dead letter was deleted by hand.
    """
    using = database()
    streams = OutboxStream.objects.using(using)
    with transaction.atomic(using=using):
        locked = _empty(using).order_by("pk").select_for_update(skip_locked=_can_skip(using))
        found = set(locked.values_list("pk", flat=True)[:limit])
        # Only now, with the locks, can nobody publish to them: look again.
        used = set(_of(using).filter(stream__in=found).values_list("stream", flat=True))
        deleted: int = streams.filter(pk__in=found - used).delete()[0]
    if deleted < limit:
        OUTBOX.revive(using)
    return deleted


def _empty(using: str) -> QuerySet[OutboxStream]:
    messages = _of(using).filter(stream=OuterRef("stream"))
    return OutboxStream.objects.using(using).filter(~Exists(messages))


def over(older_than: timedelta) -> QuerySet[OutboxMessage]:
    """What a purge deletes that was over that long ago."""
    now = DatabaseNow()
    no_window = Q(dedup_until=None) | Q(dedup_until__lte=now)
    return _of(database()).filter(no_window, purge_at__lte=now - older_than)


def _of(using: str) -> QuerySet[OutboxMessage]:
    return OutboxMessage.objects.using(using)


def _can_skip(using: str) -> bool:
    return connections[using].features.has_select_for_update_skip_locked
