"""Dead letters: what cannot be handled is kept in a table, so that its broker may forget it.

An operator finds it in the admin, and says when to handle it again. The table comes with the app
``idempotency_django.contrib.messaging``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256
from typing import Any, Final
from urllib.parse import quote

from django.apps import apps

from ...errors import FingerprintMismatch
from ...models import NO_OWNER, DatabaseNow, IdempotencyKey, IdempotencyKeyQuerySet
from ...policy import keys
from ...stores import Status, plain
from .consumers import Consumer, RecordOf
from .databases import database, reason
from .errors import DeadLettered
from .events import Event

SENDER: Final = "idempotency-sender"
"""The header with the sender of a message to a federated consumer."""

_APP: Final = "idempotency_messaging"
_DEAD: Final = "dead"  # of MessageState, which can be imported only where the app is installed
_OVER: Final = (_DEAD, "done", "discarded")
_TYPE_LENGTH: Final = 255
_CAUSES: Final = 5


def keep(consumer: Consumer, event: Event, error: Exception, *, sender: str = "") -> None:
    """Keep an event that the consumer could not handle. It is durable when this returns.

    The same event is kept once, however often this is called.

    Args:
        consumer: the consumer.
        event: the event.
        error: why it could not be handled.
        sender: who sent it; for a federated consumer.

    Raises:
        ValueError: the event's data is neither bytes nor what JSON can say.
    """
    body = event.to_json().encode()
    message_id = _named(event.source, event.id)
    if isinstance(error, FingerprintMismatch):  # another event has that id
        message_id = f"{message_id}#{_digest(body)}"
    headers = [(SENDER, sender)] if sender else []
    _keep(consumer, message_id, event.type, body, error, headers)


def message_id_of(source: str, event_id: str) -> str:
    """The id that an event has in the table, unless it was kept as a different one."""
    return keys.fit(_named(source, event_id))


def sender_of(headers: Iterable[tuple[str, str]]) -> str:
    """The sender of an event, from its stored headers; empty: its consumer is not federated."""
    return dict(headers).get(SENDER, "")


def _named(source: str, event_id: str) -> str:
    # The fragment's sign keeps "a b" and "c" apart from "a" and "b c"; a source has none in it.
    return f"{quote(source, safe='/:?=&@+,;')}#{event_id}"


def keep_raw(
    consumer: Consumer,
    place: str,
    body: bytes,
    error: Exception,
    headers: Iterable[tuple[str, str]] = (),
) -> None:
    """Keep a message that is not an event. It is durable when this returns.

    Args:
        consumer: the consumer.
        place: where it was at its broker, the same at each delivery.
        body: the message's body, as it came.
        error: why it is not an event.
        headers: the message's headers.
    """
    message_id = f"{place}#{_digest(body)}"
    _keep(consumer, message_id, "", body, error, headers)


def _keep(
    consumer: Consumer,
    message_id: str,
    kind: str,
    body: bytes,
    error: Exception,
    headers: Iterable[tuple[str, str]],
) -> None:
    rows = apps.get_model(_APP, "InboxMessage")._default_manager.using(database())
    named: dict[str, Any] = {
        "source": f"consumer:{consumer.name}",
        "message_id": keys.fit(message_id),
    }
    found: dict[str, Any] = {"state": _DEAD, "error": _text_of(error), "process_after": None}
    row = rows.model(
        **named,
        **found,
        type=plain(kind, _TYPE_LENGTH),
        headers=json.dumps([*headers]),
        body=body,
        digest=_digest(body),
        received_at=DatabaseNow(),
    )
    rows.bulk_create([row], ignore_conflicts=True)
    # One that an operator has just sent on its way again stays on its way.
    over = rows.filter(**named, state__in=_OVER)
    if isinstance(error, DeadLettered) and error.__cause__ is None:
        # It is delivered again, and nothing was tried: the row knows better why it is dead.
        over.exclude(error="").update(state=_DEAD, process_after=None, purge_at=None)
        over = over.filter(error="")
    over.update(**found, purge_at=None)


def _text_of(error: Exception) -> str:
    """The error and what caused it, one in each line."""
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(lines) < _CAUSES:
        lines.append(reason(cause))
        cause = cause.__cause__
    return "\n".join(lines)


def _digest(body: bytes) -> str:
    return sha256(body).hexdigest()


def rows_of(record: RecordOf) -> IdempotencyKeyQuerySet:
    """The record of a message, unless another event with its id has it.

    Raises:
        ValueError: it is not in a database.
    """
    if record.store.using is None:
        raise ValueError(
            f"The record of the message is in the store {record.store.alias!r}, where it cannot "
            "be released. It expires with its time to live. Keep such records in a database."
        )
    rows = IdempotencyKey.objects.using(record.store.using)
    return rows.filter(key=record.key, scope=record.scope, fingerprint__in=[*record.fingerprints])


def release(record: RecordOf, by: str) -> None:
    """Let the next attempt have a record that is held: an operator retries its message."""
    rows_of(record).held().update(
        status=Status.FAILED,
        pinned=True,  # the attempts' external effects belong to this message
        owner_token=NO_OWNER,  # an owner that is late no longer owns it
        lease_expires_at=None,
        completed_at=DatabaseNow(),
        error=f"Released by {by}, who retried the message.",
    )
