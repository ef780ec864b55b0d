"""Deleting messages that are done and remembered no longer."""

from __future__ import annotations

from datetime import timedelta

from django.db import connections, transaction
from django.db.models import QuerySet

from ...models import DatabaseNow
from ...stores import purging
from ..databases import database
from ..models import InboxMessage
from .processing import INBOX


def register_purge() -> None:
    """Have the command and the task purge the inbox."""
    purging.register("inbox messages", purge_inbox, purgeable_inbox)


def purgeable_inbox(older_than: timedelta) -> int:
    """How many messages :func:`purge_inbox` would delete."""
    return over(older_than).count()


def purge_inbox(older_than: timedelta, limit: int) -> int:
    """Delete up to that many messages whose time was over that long ago; how many there were.

    The oldest are deleted first, in one short transaction. What is pending or dead is kept. A group
    goes on whose dead letter was deleted by hand, or holds it up no longer.
    """
    using = database()
    skip = connections[using].features.has_select_for_update_skip_locked
    rows = InboxMessage.objects.using(using)
    with transaction.atomic(using=using):
        oldest = over(older_than).order_by("purge_at", "pk")
        keys = oldest.select_for_update(skip_locked=skip).values_list("pk", flat=True)[:limit]
        deleted: int = rows.filter(pk__in=list(keys)).delete()[0]
    if deleted < limit:
        INBOX.revive(using)
    return deleted


def over(older_than: timedelta) -> QuerySet[InboxMessage]:
    """What a purge deletes that was over that long ago."""
    rows = InboxMessage.objects.using(database())
    return rows.filter(purge_at__lte=DatabaseNow() - older_than)
