"""The operator's actions on messages: retry, discard and repeat.

They are the same for the inbox and the outbox. What differs is in the classes of the two queues.

- ``"retry"``: have a dead letter handled or sent again; in the inbox, also what waits for its next
  attempt. It is the same message. For the handler of an inbox message, it is a further attempt at
  the same operation: stored steps are not done again, and derived keys are the same.
- ``"discard"``: discard a dead letter. Its group in the outbox continues. It is purged later.
  For consumers, what is delivered again is a duplicate, if there was an attempt at it.
- ``"repeat"``: have a message that is done or discarded handled or sent once more. The handler of
  an inbox message that was done starts from the beginning, and the keys that it derives for other
  services are the same. An outbox message is sent again as a copy under a new id, because every
  consumer and every broker that recognises duplicates would drop the message under its old one. In
  a group, the copy gets the next number: it follows what was published since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.db.models import QuerySet

from ...errors import IdempotencyError
from ...models import unlocked
from .databases import database
from .inbox import INBOX
from .models import InboxMessage, MessageState, OutboxMessage
from .outbox.relay import OUTBOX
from .queue import Queue

logger = logging.getLogger("idempotency_django")

Message = InboxMessage | OutboxMessage

AT_ONCE: Final = 500
"""How many messages are settled in a transaction."""

_QUEUES: Final[Mapping[type, Queue]] = {InboxMessage: INBOX, OutboxMessage: OUTBOX}

_FITS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "retry": lambda row: row.state in _QUEUES[type(row)].retried,
    "discard": lambda row: row.state == MessageState.DEAD,
    "repeat": lambda row: row.state in (MessageState.DONE, MessageState.DISCARDED),
}


def fits(message: Message, action: str) -> bool:
    """Whether the action fits the message as it is."""
    return _FITS[action](message)


def settle(rows: QuerySet[Any], action: str, *, by: str) -> list[tuple[Message, str]]:
    """Do an operator's action to messages, up to :data:`AT_ONCE` of them in a transaction.

    Args:
        rows: the messages, which the action may take out of the query.
        action: ``"retry"``, ``"discard"`` or ``"repeat"``.
        by: the operator's name, for the record.

    Returns:
        Each message, and the reason why it was not settled, which is empty if it was.
    """
    outcomes: list[tuple[Message, str]] = []
    last = 0
    while some := [*rows.filter(pk__gt=last).order_by("pk")[:AT_ONCE]]:
        outcomes += _settled(some, action, by)
        last = some[-1].pk
    return outcomes


def _settled(some: Sequence[Message], action: str, by: str) -> Sequence[tuple[Message, str]]:
    queue, using = _QUEUES[type(some[0])], database()
    outcomes: list[tuple[Message, str]] = []
    changed: dict[tuple[tuple[str, Any], ...], list[Message]] = {}
    with transaction.atomic(using=using):
        # The transaction of a handler, and of a claim, locks the row.
        free = unlocked(queue.all(using).filter(pk__in=[message.pk for message in some]))
        found = {row.pk: row for row in free}
        for message in some:
            try:
                changes = _changes(queue, found.get(message.pk), action, by)
            except (LookupError, ValueError, ImproperlyConfigured, IdempotencyError) as error:
                outcomes.append((message, str(error)))
            else:
                changed.setdefault((*changes.items(),), []).append(found[message.pk])
                outcomes.append((message, ""))
                logger.info("The message %s was settled by %s: %s.", message, by, action)
        for columns, those in changed.items():
            rows = queue.all(using).filter(pk__in=[row.pk for row in those])
            queue.finish(rows, those, **dict(columns))
    return outcomes


def _changes(queue: Queue, row: Message | None, action: str, by: str) -> dict[str, Any]:
    """Do what the action does besides the row; the columns of the row that change.

    An action that is refused has written nothing.

    Raises:
        LookupError: the message is in use, or its receiver is gone.
        UnknownEventType: its handler is gone.
        ValueError: the action does not fit its state, or its record cannot be changed.
        ImproperlyConfigured: its topic cannot be used.
    """
    if row is None:
        raise LookupError("The message is being handled or sent now. Try again later.")
    if not fits(row, action):
        raise ValueError(
            f"The state of the message is now “{row.get_state_display()}”, so this action no "
            "longer applies. Reload it."
        )
    changes: dict[str, Any] = getattr(queue, action)(row, by)
    return changes
