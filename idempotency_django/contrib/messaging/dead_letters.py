"""Dead letters: what cannot be handled is kept in a table, so that its broker may forget it.

An operator finds it in the admin, and says when to handle it again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256
from typing import Any, Final
from urllib.parse import quote

from ...engine import Plan
from ...errors import FingerprintMismatch
from ...models import NO_OWNER, DatabaseNow, IdempotencyKey, IdempotencyKeyQuerySet
from ...policy import keys, scopes
from ...stores import Status, plain, reference
from .consumers import Consumer
from .databases import database, reason
from .errors import DeadLettered, UnknownEventType
from .events import Event
from .models import InboxMessage, MessageState

_OVER: Final = (MessageState.DEAD, MessageState.DONE, MessageState.DISCARDED)
_TYPE_LENGTH: Final = 255

_SETTLED: Final[dict[str, Any]] = {
    "pinned": True,  # the attempts' external effects belong to this message
    "owner_token": NO_OWNER,  # an owner that is late no longer owns it
    "lease_expires_at": None,
    "completed_at": DatabaseNow(),
}
"""What a record has that is held no more."""

_DISCARDED: Final = "Discarded by"


def keep(
    consumer: Consumer,
    body: bytes,
    error: Exception,
    *,
    place: str = "",
    headers: Iterable[tuple[str, str]] = (),
) -> None:
    """Keep a message that the consumer could not handle. It is durable when this returns.

    The same event is kept once, however often this is called. So is what is no event, and is at
    one place.

    Args:
        consumer: the consumer.
        body: the message's body, as it came. It is kept as it is, and can be retried if it is an
            event in JSON.
        error: why it could not be handled.
        place: where it was at its broker, the same at each delivery.
        headers: the message's headers.
    """
    digest = sha256(body).hexdigest()
    try:
        event = Event.from_json(body)
    except ValueError:
        message_id, kind, caused_by = f"{place}#{digest}", "", ""
    else:
        # The fragment's sign keeps "a b" and "c" apart from "a" and "b c"; a source has none in it.
        message_id = f"{quote(event.source, safe='/:?=&@+,;')}#{event.id}"
        kind, caused_by = plain(event.type, _TYPE_LENGTH), event.caused_by
        if isinstance(error, FingerprintMismatch):  # another event has that id
            message_id = f"{message_id}#{digest}"
        if not isinstance(error, UnknownEventType):  # else there was no attempt
            caused_by = reference(keys.fit(event.id), scopes.fit(consumer.scope(event.source)))
    rows = InboxMessage.objects.using(database())
    named: dict[str, Any] = {
        "source": f"consumer:{consumer.name}",
        "message_id": keys.fit(message_id),
    }
    texts = [reason(each) for each in (error, error.__cause__) if each]
    dead: dict[str, Any] = {"state": MessageState.DEAD, "process_after": None}
    found: dict[str, Any] = {**dead, "error": "\n".join(texts), "caused_by": caused_by}
    row = InboxMessage(
        **named,
        **found,
        type=kind,
        headers=json.dumps([*headers]),
        body=body,
        digest=digest,
        received_at=DatabaseNow(),
    )
    rows.bulk_create([row], ignore_conflicts=True)
    # One that an operator has just sent on its way again stays on its way.
    over = rows.filter(**named, state__in=_OVER)
    # If nothing was tried in this delivery, the row knows better what has become of it: an operator
    # may have discarded it just now.
    knows = isinstance(error, DeadLettered) and error.__cause__ is None
    over = over.exclude(state=MessageState.DISCARDED) if knows else over
    over.update(**dead, purge_at=None)
    over.filter(**{"error": ""} if knows else {}).update(**found)


def rows_of(plan: Plan) -> IdempotencyKeyQuerySet:
    """The record of a message, unless another event with its id has it.

    Raises:
        ValueError: it keeps the message from being handled, and is not in a database.
        StoreUnavailable: its store cannot be asked.
    """
    store, operation = plan.store, plan.operation
    if store.using is None:
        record = store.get(operation.key, operation.scope)
        if record is None or not (record.held or record.status == Status.COMPLETED):
            return IdempotencyKey.objects.none()
        raise ValueError(
            f"The record of the message is in the store {store.alias!r}, where it cannot be "
            "released. It expires with its time to live. Keep such records in a database."
        )
    rows = IdempotencyKey.objects.using(store.using)
    fingerprints = [*operation.fingerprints]
    return rows.filter(key=operation.key, scope=operation.scope, fingerprint__in=fingerprints)


def release(plan: Plan, by: str) -> None:
    """Let the next attempt have a record that is held: an operator retries its message.

    So it is where a discard was undone that had completed the record: they may be in two databases.
    """
    rows, error = rows_of(plan), f"Released by {by}, who retried the message."
    discarded = rows.filter(status=Status.COMPLETED, error__startswith=_DISCARDED)
    (rows.held() | discarded).update(status=Status.FAILED, error=error, **_SETTLED)
    plan.store.forget(plan.operation.key, plan.operation.scope)


def close(plan: Plan, by: str) -> None:
    """Complete a record that is held: an operator discards its message. Deliveries of it that may
    still come are duplicates, for as long as those of a message that was handled.
    """
    operation = plan.operation
    rows_of(plan).held().update(
        status=Status.COMPLETED,
        response_status=200,  # without a body: there is no result
        expires_at=None if operation.ttl is None else DatabaseNow() + operation.ttl,
        purge_at=None if operation.kept is None else DatabaseNow() + operation.kept,
        error=f"{_DISCARDED} {by}.",
        **_SETTLED,
    )
