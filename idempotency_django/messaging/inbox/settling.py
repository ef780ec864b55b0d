"""What an operator does to a message: retry it, reprocess it, or accept it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from django.db import transaction
from django.db.models import F, QuerySet
from django.db.models.functions import Coalesce

from ...models import NO_OWNER, DatabaseNow, IdempotencyKey
from ...records import Status
from ..consumers import RecordOf
from ..databases import database
from ..models import InboxMessage, InboxState
from .receivers import NobodyThere, record_of

logger = logging.getLogger("idempotency_django")

RETRIED: Final = (InboxState.PARKED, InboxState.PENDING)
REPROCESSED: Final = (InboxState.HANDLED, InboxState.IGNORED)
ACCEPTED: Final = (InboxState.HELD,)


class NotSettled(Exception):
    """Why nothing was done."""


def retry(pk: int, *, by: str) -> None:
    """Have a message handled again that is parked, or that waits for its next attempt.

    It is the same operation: stored steps are not done again, and derived keys are the same.

    Args:
        pk: the message's primary key.
        by: who says so, for the record.

    Raises:
        NotSettled: it is in another state, or its record cannot be released.
    """
    _settle(pk, RETRIED, partial(_release, by=by))
    logger.info("The message %d of the inbox was retried by %s.", pk, by)


def reprocess(pk: int, *, by: str) -> None:
    """Have a message handled once more that was handled or ignored.

    Its record expires, so that the handler begins anew, as a further attempt at the same operation:
    the keys that it derives for other services are the same.

    Args:
        pk: the message's primary key.
        by: who says so.

    Raises:
        NotSettled: it is in another state, or its record cannot be expired.
    """
    _settle(pk, REPROCESSED, _expire)
    logger.info("The message %d of the inbox was reprocessed by %s.", pk, by)


def accept(pk: int, *, by: str) -> None:
    """Have a message handled that was held: another one with its id or its body came before.

    Args:
        pk: the message's primary key.
        by: who says so.

    Raises:
        NotSettled: it is in another state.
    """
    _settle(pk, ACCEPTED)
    logger.info("The message %d of the inbox was accepted by %s.", pk, by)


def _settle(
    pk: int, states: Sequence[InboxState], change: Callable[[InboxMessage], None] | None = None
) -> None:
    using = database()
    with transaction.atomic(using=using):
        rows: QuerySet[InboxMessage] = InboxMessage.objects.using(using).filter(pk=pk)
        message = rows.select_for_update().first()
        if message is None:
            raise NotSettled("The message has been deleted in the meantime.")
        if message.state not in states:
            raise NotSettled(
                f"The message is {message.get_state_display()} now, so there is nothing to do. "
                "Look at it again."
            )
        if change is not None:
            try:
                change(message)
            except (NobodyThere, ValueError) as error:
                raise NotSettled(str(error)) from error
        # The attempt of another process that is late finds that it is not its own any more.
        rows.update(
            state=InboxState.PENDING,
            attempts=F("attempts") + 1,
            process_after=DatabaseNow(),
            processed_at=None,
            purge_at=None,
        )


def _release(message: InboxMessage, by: str) -> None:
    """Let the next attempt have a record that is held."""
    if message.state != InboxState.PARKED:
        return  # its next attempt was to come anyway
    _rows(record_of(message)).held().update(
        status=Status.FAILED,
        pinned=True,  # what the attempts have done elsewhere was done for this message
        owner_token=NO_OWNER,  # an owner that is late no longer owns it
        lease_expires_at=None,
        completed_at=DatabaseNow(),
        error=f"Released by {by}, who retried the message.",
    )


def _expire(message: InboxMessage) -> None:
    record = record_of(message)
    now, retention = DatabaseNow(), F("purge_at") - F("expires_at")
    completed = _rows(record).filter(status=Status.COMPLETED)
    completed.update(purge_at=Coalesce(now + retention, now), expires_at=now)
    record.store.forget(record.key, record.scope)


def _rows(record: RecordOf) -> Any:
    """The record, unless it is the one of another event with this id."""
    if record.store.using is None:
        raise NotSettled(
            f"The record of the message is in the store {record.store.alias!r}, where nobody can "
            "change it. It ends with its time to live. Keep such records in a database."
        )
    rows = IdempotencyKey.objects.using(record.store.using)
    return rows.filter(key=record.key, scope=record.scope, fingerprint__in=[*record.fingerprints])
