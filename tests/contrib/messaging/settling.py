"""An operator's action on one message."""

from __future__ import annotations

from idempotency_django.contrib.messaging import settling
from idempotency_django.contrib.messaging.databases import database
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage


class NotSettled(Exception):
    """The action was refused; the text is the reason."""


def settle(message: InboxMessage | OutboxMessage, action: str, *, by: str) -> None:
    """Do an operator's action to a message, or raise the reason why it is refused."""
    rows = type(message)._base_manager.using(message._state.db or database())
    for _, refusal in settling.settle(rows.filter(pk=message.pk), action, by=by):
        if refusal:
            raise NotSettled(refusal)
