"""Which process handles which message: a claim is a time before which nobody else takes it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from django.db import transaction
from django.db.models import F

from ...models import DatabaseNow
from ...policy import PROJECT_POLICY
from ..databases import database, unindexed
from ..models import InboxMessage
from ..models.inbox import InboxState
from ..queue import Queue
from .receivers import receivers

INBOX: Final = Queue(InboxMessage, ("source", "group"), "id", InboxState.PARKED)


def claim(sources: Collection[str], at_most: int) -> list[InboxMessage]:
    """Claim messages that are due, the longest due ones first; nobody waits for anybody here.

    Of a group, it is the earliest one that is not done. A claim lasts as long as the lease of the
    project's policy. After it the message is due again, and its record says whether it is still
    being handled.

    Args:
        sources: of which sources; empty: of all.
        at_most: how many.
    """
    using = database()
    rows = InboxMessage.objects.using(using)
    wanted = rows.alias(of=unindexed(F("source"))).filter(of__in=sources) if sources else rows.all()
    lease = PROJECT_POLICY.resolved().lease
    changes = {"process_after": DatabaseNow() + lease, "attempts": F("attempts") + 1}
    known = receivers().items()
    passing = [source for source, each in known if not each[-1].parked_blocks_group]
    return INBOX.rows(using, INBOX.claim(wanted, at_most, changes, passing=passing), changes)


def give_back(messages: Sequence[InboxMessage]) -> None:
    """Let others have messages that were claimed, and not begun."""
    for message in messages:
        mark(message, process_after=DatabaseNow(), attempts=F("attempts") - 1)


def mark(message: InboxMessage, **changes: Any) -> bool:
    """Change a message; ``False``: it has been claimed again or settled since, and is unchanged.

    When it is not pending any more, its group goes on.
    """
    using = database()
    mine = InboxMessage.objects.using(using).filter(
        pk=message.pk, state=InboxState.PENDING, attempts=message.attempts
    )
    if not message.group or changes.get("state", InboxState.PENDING) == InboxState.PENDING:
        return bool(mine.update(**changes))
    with transaction.atomic(using=using):
        done = bool(mine.update(**changes))
        if done:
            INBOX.promote(using, [(message.source, message.group)])
    return done
