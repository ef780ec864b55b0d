"""What an operator's decision changes in the record of an inbox message."""

from __future__ import annotations

from typing import Any

from django.db.models import F
from django.db.models.functions import Coalesce

from ...models import NO_OWNER, DatabaseNow, IdempotencyKey
from ...records import Status
from ..consumers import RecordOf
from ..models import InboxMessage
from .receivers import record_of


def release(message: InboxMessage, by: str) -> None:
    """Let the next attempt have a record that is held."""
    _rows(record_of(message)).held().update(
        status=Status.FAILED,
        pinned=True,  # what the attempts have done elsewhere was done for this message
        owner_token=NO_OWNER,  # an owner that is late no longer owns it
        lease_expires_at=None,
        completed_at=DatabaseNow(),
        error=f"Released by {by}, who retried the message.",
    )


def expire(message: InboxMessage) -> None:
    """Let the next attempt begin anew."""
    record = record_of(message)
    now, retention = DatabaseNow(), F("purge_at") - F("expires_at")
    completed = _rows(record).filter(status=Status.COMPLETED)
    completed.update(purge_at=Coalesce(now + retention, now), expires_at=now)
    record.store.forget(record.key, record.scope)


def _rows(record: RecordOf) -> Any:
    """The record, unless it is the one of another event with this id."""
    if record.store.using is None:
        raise ValueError(
            f"The record of the message is in the store {record.store.alias!r}, where nobody can "
            "change it. It ends with its time to live. Keep such records in a database."
        )
    rows = IdempotencyKey.objects.using(record.store.using)
    return rows.filter(key=record.key, scope=record.scope, fingerprint__in=[*record.fingerprints])
