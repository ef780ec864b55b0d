"""Which process handles which message: a claim is a time before which nobody else takes it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from django.db import connections, transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.db.models.functions import Collate

from ...models import DatabaseNow
from ...policy import PROJECT_POLICY
from ..databases import database, unindexed
from ..models import InboxMessage
from ..models.inbox import InboxState
from .receivers import receivers


def claim(sources: Collection[str], at_most: int) -> list[InboxMessage]:
    """Claim messages that are due, the longest due ones first; nobody waits for anybody here.

    A claim lasts as long as the lease of the project's policy. After it the message is due again,
    and its record says whether it is still being handled.
    """
    using = database()
    skip = connections[using].features.has_select_for_update_skip_locked
    with transaction.atomic(using=using):
        rows = due(sources).order_by("process_after", "pk").select_for_update(skip_locked=skip)
        claimed = list(rows[:at_most])
        if claimed:
            InboxMessage.objects.using(using).filter(pk__in=[each.pk for each in claimed]).update(
                process_after=DatabaseNow() + PROJECT_POLICY.resolved().lease,
                attempts=F("attempts") + 1,
            )
    for message in claimed:
        message.attempts += 1
    return claimed


def give_back(messages: Sequence[InboxMessage]) -> None:
    """Let others have messages that were claimed, and not begun."""
    for message in messages:
        mark(message, process_after=DatabaseNow(), attempts=F("attempts") - 1)


def mark(message: InboxMessage, **changes: Any) -> bool:
    """Change a message; ``False``: it has been claimed again or settled since, and is unchanged."""
    mine = InboxMessage.objects.using(database()).filter(
        pk=message.pk, state=InboxState.PENDING, attempts=message.attempts
    )
    return bool(mine.update(**changes))


def due(sources: Collection[str]) -> QuerySet[InboxMessage]:
    """The messages that may be handled now, by the database's clock; of all sources if empty.

    Of a group, it is the earliest one that is not done.
    """
    passing = [source for source, known in receivers().items() if not known[-1].parked_blocks_group]
    unfinished = Q(state=InboxState.PENDING) | (Q(state=InboxState.PARKED) & ~Q(source__in=passing))
    using = database()
    # As the index of the groups is collated on PostgreSQL.
    source = (
        Collate("source", "POSIX") if connections[using].vendor == "postgresql" else F("source")
    )
    earlier = InboxMessage.objects.alias(of=source).filter(
        unfinished, of=OuterRef("source"), group=OuterRef("group"), pk__lt=OuterRef("pk")
    )
    rows = InboxMessage.objects.using(using).filter(
        Q(group="") | ~Exists(earlier), state=InboxState.PENDING, process_after__lte=DatabaseNow()
    )
    return rows.alias(of=unindexed(F("source"))).filter(of__in=sources) if sources else rows
