"""Messages of the outbox and the inbox, as rows."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.stores.records import reference
from tests.support.factories import ago


def published(**columns: Any) -> OutboxMessage:
    """A message of the outbox that was sent, unless the columns say otherwise."""
    given = {
        "message_id": str(uuid4()),
        "topic": "orders",
        "type": "order.paid",
        "payload": "{}",
        "state": "done",
        "attempts": 1,
        "created_at": ago(minutes=3),
        "sent_at": ago(minutes=2),
        **columns,
    }
    return OutboxMessage.objects.create(**given)


def received(**columns: Any) -> InboxMessage:
    """A message of the inbox that was handled, unless the columns say otherwise."""
    given = {
        "message_id": str(uuid4()),
        "source": "stripe",
        "type": "invoice.paid",
        "body": b"{}",
        "digest": uuid4().hex,
        "state": "done",
        "attempts": 1,
        "received_at": ago(minutes=3),
        "processed_at": ago(minutes=2),
        **columns,
    }
    return InboxMessage.objects.create(**given)


def named(row: Any) -> str:
    """The reference of a record or message."""
    if isinstance(row, OutboxMessage):
        return reference(row.message_id, f"outbox:{row.topic}")
    if isinstance(row, InboxMessage):
        return reference(row.message_id, f"inbox:{row.source}")
    return reference(row.key, row.scope)
