"""The operator's actions on messages: retry, discard, accept and repeat.

The functions are the same for the inbox and the outbox. What differs is in the classes of the two
queues.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

from ...models import unlocked
from .databases import database
from .inbox.processing import INBOX
from .models import InboxMessage, MessageState, OutboxMessage
from .outbox.relay import OUTBOX
from .queue import Queue

logger = logging.getLogger("idempotency_django")

Message = InboxMessage | OutboxMessage

AT_ONCE: Final = 500
"""How many dead letters are read at a time."""

_QUEUES: Final[dict[type, Queue]] = {InboxMessage: INBOX, OutboxMessage: OUTBOX}


class NotSettled(Exception):
    """The action was refused; the text is the reason."""


def can_retry(message: Message) -> bool:
    """Whether :func:`retry` fits the message as it is."""
    return message.state in _QUEUES[type(message)].retried and not message.is_suspect


def can_discard(message: Message) -> bool:
    """Whether :func:`discard` fits the message as it is."""
    return message.state == MessageState.DEAD


def can_accept(message: Message) -> bool:
    """Whether :func:`accept` fits the message as it is."""
    return message.state == MessageState.DEAD and message.is_suspect


def can_repeat(message: Message) -> bool:
    """Whether :func:`repeat` fits the message as it is."""
    return message.state in (MessageState.DONE, MessageState.DISCARDED)


def retry(message: Message, *, by: str) -> None:
    """Have a dead letter handled or sent again; in the inbox, also what waits for its next attempt.

    It is the same message. For the handler of an inbox message, it is a further attempt at the same
    operation: stored steps are not done again, and derived keys are the same.

    Args:
        message: the message.
        by: the operator's name, for the record.

    Raises:
        NotSettled: it is in another state, or its record cannot be released.
    """
    _settle(message, by, "retried", can_retry, _QUEUES[type(message)].retry)


def discard(message: Message, *, by: str) -> None:
    """Discard a dead letter, so that its group continues without it. It is purged later.

    Args:
        message: the message.
        by: the operator's name.

    Raises:
        NotSettled: it is in another state.
    """
    _settle(message, by, "discarded", can_discard, _QUEUES[type(message)].discard)


def accept(message: Message, *, by: str) -> None:
    """Have a message handled although another one with its id or its body came before.

    Args:
        message: the message, of the inbox.
        by: the operator's name.

    Raises:
        NotSettled: it is in another state, or no such message came before.
    """
    _settle(message, by, "accepted", can_accept, _QUEUES[type(message)].accept)


def repeat(message: Message, *, by: str) -> None:
    """Have a message that is done or discarded handled or sent once more.

    An inbox message is reprocessed: its handler starts from the beginning, as a further attempt at
    the same operation, so that the keys that it derives for other services are the same. An outbox
    message is sent again as a copy under a new id, because every consumer and every broker that
    recognises duplicates would drop the message under its old one. In a group, the copy gets the
    next number: it follows what was published since.

    Args:
        message: the message.
        by: the operator's name.

    Raises:
        NotSettled: it is in another state, or its record cannot be expired.
    """
    _settle(message, by, "repeated", can_repeat, _QUEUES[type(message)].repeat)


def settle_all(
    model: type[Message], change: Callable[..., None], by: str, **chosen: Any
) -> tuple[int, Counter[str]]:
    """Settle many dead letters, each in a transaction of its own.

    Args:
        model: of the inbox or the outbox.
        change: :func:`retry` or :func:`discard`.
        by: the operator's name.
        chosen: which ones, such as ``topic="orders"``.

    Returns:
        The number of those that were settled, and the reasons why others were not, with theirs.
    """
    dead = _QUEUES[model].all(database()).filter(state=MessageState.DEAD, **chosen).order_by("pk")
    refusals: Counter[str] = Counter()
    last = settled = 0
    while some := list(dead.filter(pk__gt=last)[:AT_ONCE]):
        for row in some:
            try:
                change(row, by=by)
                settled += 1
            except NotSettled as error:
                refusals[str(error)] += 1
        last = some[-1].pk
    return settled, refusals


def alike(message: Message) -> dict[str, Any]:
    """Which dead letters are like this one, for :func:`settle_all`: they have the same error, and
    the same topic or source.
    """
    place = _QUEUES[type(message)].place
    return {place: getattr(message, place), "error": message.error}


def _settle(
    message: Message,
    by: str,
    done: str,
    fits: Callable[[Any], bool],
    change: Callable[[Any, str], dict[str, Any]],
) -> None:
    queue, using = _QUEUES[type(message)], message._state.db or database()
    rows = queue.all(using).filter(pk=message.pk)
    with transaction.atomic(using=using):
        # The transaction of a handler, and of a claim, locks the row.
        row = unlocked(rows).first()
        if row is None and rows.exists():
            raise NotSettled("The message is being handled or sent now. Try again later.")
        if row is None:
            raise NotSettled("The message has been deleted in the meantime.")
        if not fits(row):
            raise NotSettled(
                f"The state of the message is now “{row.get_state_display()}”, so this action no "
                "longer applies. Reload it."
            )
        try:
            changes = change(row, by)
        except (LookupError, ValueError, ImproperlyConfigured) as error:
            raise NotSettled(str(error)) from error
        if changes:
            queue.finish(rows, [row], **changes)
    logger.info("The message %s was %s by %s.", message, done, by)
