"""What an operator does with messages: retry or skip what is blocked, send again what was sent."""

from __future__ import annotations

from django.db import transaction
from django.db.models import QuerySet

from ...models import DatabaseNow
from ..models import OutboxMessage, OutboxState
from .publishing import insert, next_sequence, topic, uuid7
from .relay import OUTBOX


def retry(rows: QuerySet[OutboxMessage]) -> int:
    """Have the blocked ones among the messages sent again, with all their attempts before them."""
    with transaction.atomic(using=rows.db):
        blocked = _locked(rows, OutboxState.BLOCKED)
        _of(rows, blocked).update(
            state=OutboxState.PENDING, attempts=0, process_after=DatabaseNow(), error=""
        )
    return len(blocked)


def skip(rows: QuerySet[OutboxMessage]) -> int:
    """Give up the blocked ones among the messages, so that their groups go on without them."""
    with transaction.atomic(using=rows.db):
        blocked = _locked(rows, OutboxState.BLOCKED)
        for message in blocked:
            kept = topic(message.topic).retention
            _of(rows, [message]).update(
                state=OutboxState.SKIPPED,
                purge_at=DatabaseNow() + kept,
                dedup=None,  # it was never sent, so nothing would be a duplicate of it
                dedup_until=None,
            )
        OUTBOX.promote(rows.db, {(message.stream,) for message in blocked if message.stream})
    return len(blocked)


def resend(rows: QuerySet[OutboxMessage]) -> list[str]:
    """Publish the sent ones among the messages once more, under new ids; these ids.

    Under its old id, every consumer and every broker that recognises duplicates would drop the
    message. In a group, it gets the next number: it follows what was published since.
    """
    again = []
    with transaction.atomic(using=rows.db):
        sent = (OutboxState.SENT, OutboxState.SKIPPED)
        for message in _locked(rows, *sent):
            number = next_sequence(message.stream, rows.db) if message.stream else 0
            again.append(_copy(message, number))
        insert(again, rows.db)
    return [message.message_id for message in again]


def _copy(message: OutboxMessage, number: int) -> OutboxMessage:
    kept = ("topic", "stream", "type", "group", "payload", "is_base64", "headers", "caused_by")
    return OutboxMessage(
        **{name: getattr(message, name) for name in kept},
        message_id=uuid7(),
        sequence=number,
        process_after=DatabaseNow(),
        created_at=DatabaseNow(),
    )


def _locked(rows: QuerySet[OutboxMessage], *states: OutboxState) -> list[OutboxMessage]:
    """Those of the messages that are in one of these states, in the order of groups and numbers."""
    chosen = rows.model.objects.using(rows.db).filter(pk__in=rows.order_by().values_list("pk"))
    return list(chosen.filter(state__in=states).order_by("stream", "sequence").select_for_update())


def _of(rows: QuerySet[OutboxMessage], messages: list[OutboxMessage]) -> QuerySet[OutboxMessage]:
    return OutboxMessage.objects.using(rows.db).filter(pk__in=[each.pk for each in messages])
