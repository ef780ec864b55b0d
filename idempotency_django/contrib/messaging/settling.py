"""The operator's actions on messages: retry, discard, accept and repeat.

They are the same for the inbox and the outbox. What differs is in the classes of the two queues.

- ``"retry"``: have a dead letter handled or sent again; in the inbox, also what waits for its next
  attempt. It is the same message. For the handler of an inbox message, it is a further attempt at
  the same operation: stored steps are not done again, and derived keys are the same.
- ``"discard"``: discard a dead letter, so that its group continues without it. It is purged later.
- ``"accept"``: have a message of the inbox handled although another one with its id or its body
  came before.
- ``"repeat"``: have a message that is done or discarded handled or sent once more. The handler of
  an inbox message starts from the beginning, and the keys that it derives for other services are
  the same. An outbox message is sent again as a copy under a new id, because every consumer and
  every broker that recognises duplicates would drop the message under its old one. In a group, the
  copy gets the next number: it follows what was published since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.db.models import QuerySet

from ...models import unlocked
from .databases import database
from .inbox.processing import INBOX
from .models import InboxMessage, MessageState, OutboxMessage
from .outbox.relay import OUTBOX
from .queue import Queue

logger = logging.getLogger("idempotency_django")

Message = InboxMessage | OutboxMessage

AT_ONCE: Final = 500
"""How many messages are read at a time."""

_QUEUES: Final[Mapping[type, Queue]] = {InboxMessage: INBOX, OutboxMessage: OUTBOX}

_FITS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "retry": lambda row: row.state in _QUEUES[type(row)].retried and not row.is_suspect,
    "discard": lambda row: row.state == MessageState.DEAD,
    "accept": lambda row: row.state == MessageState.DEAD and row.is_suspect,
    "repeat": lambda row: row.state in (MessageState.DONE, MessageState.DISCARDED),
}


class NotSettled(Exception):
    """The action was refused; the text is the reason."""


def fits(message: Message, action: str) -> bool:
    """Whether the action fits the message as it is."""
    return _FITS[action](message)


def settle(message: Message, action: str, *, by: str) -> None:
    """Do an operator's action to a message.

    Args:
        message: the message.
        action: ``"retry"``, ``"discard"``, ``"accept"`` or ``"repeat"``.
        by: the operator's name, for the record.

    Raises:
        NotSettled: the action does not fit its state, or its record cannot be changed.
    """
    queue, using = _QUEUES[type(message)], message._state.db or database()
    rows = queue.all(using).filter(pk=message.pk)
    with transaction.atomic(using=using):
        # The transaction of a handler, and of a claim, locks the row.
        row = unlocked(rows).first()
        if row is None and rows.exists():
            raise NotSettled("The message is being handled or sent now. Try again later.")
        if row is None:
            raise NotSettled("The message has been deleted in the meantime.")
        if not fits(row, action):
            raise NotSettled(
                f"The state of the message is now “{row.get_state_display()}”, so this action no "
                "longer applies. Reload it."
            )
        try:
            changes: dict[str, Any] = getattr(queue, action)(row, by)
        except (LookupError, ValueError, ImproperlyConfigured) as error:
            raise NotSettled(str(error)) from error
        if changes:
            queue.finish(rows, [row], **changes)
    logger.info("The message %s was settled by %s: %s.", message, by, action)


def settle_all(rows: QuerySet[Any], action: str, *, by: str) -> Iterator[tuple[Message, str]]:
    """Settle many messages, each in a transaction of its own.

    Args:
        rows: the messages, which the action may take out of the query.
        action: as for :func:`settle`.
        by: the operator's name.

    Yields:
        Each message, and the reason why it was not settled; empty: it was.
    """
    last = 0
    while some := list(rows.filter(pk__gt=last).order_by("pk")[:AT_ONCE]):
        for row in some:
            try:
                settle(row, action, by=by)
            except NotSettled as error:
                yield row, str(error)
            else:
                yield row, ""
        last = some[-1].pk
