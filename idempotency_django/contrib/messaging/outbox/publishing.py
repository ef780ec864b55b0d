"""Publishing: a message that is sent if, and only if, the transaction around it is committed."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, connections, transaction
from django.db.models import Q

from ....engine import ExecutionContext, current_execution, current_step
from ....models import DatabaseNow
from ....policy import canonical, digest
from ...concurrency.locks import on_rollback
from ..databases import database
from ..events import validate_nesting
from ..models import OutboxMessage, OutboxStream
from . import topics

logger = logging.getLogger("idempotency_django")

_PRINTABLE: Final = re.compile(r"[!-~]([ -~]*[!-~])?", re.ASCII)

# One statement, so that the first message of a group is like any other. MySQL has no RETURNING.
_NUMBER: Final = """
    INSERT INTO {table} ({stream}, {last}) VALUES (%s, 1)
    ON CONFLICT ({stream}) DO UPDATE SET {last} = {table}.{last} + 1 RETURNING {last}
"""
_NUMBER_MYSQL: Final = """
    INSERT INTO {table} ({stream}, {last}) VALUES (%s, LAST_INSERT_ID(1))
    ON DUPLICATE KEY UPDATE {last} = LAST_INSERT_ID({last} + 1)
"""


def publish(
    topic: str,
    data: Any,
    *,
    type: str,  # noqa: A002  # CloudEvents' name for it
    group: str | None = None,
    dedup_id: str | None = None,
) -> str:
    """Have a relay send a message once the transaction is committed. ::

        with transaction.atomic():
            order.pay()
            publish("orders", {"id": order.pk}, type="order.paid", group=f"order-{order.pk}")

    It is sent at least once if the transaction commits, and not at all if it rolls back. Each time
    it has the same id, by which a :class:`~idempotency_django.contrib.messaging.Consumer`
    recognises it. An attempt that is resumed publishes nothing a second time: it knows the messages
    of earlier attempts by their ``dedup_id`` or, without one, by their order. So if it goes on with
    what is left, give each message a ``dedup_id``. A key that is used again after its record is
    gone publishes new messages.

    Args:
        topic: a topic of ``IDEMPOTENCY["OUTBOX"]``.
        data: what JSON can say and gives back as it was; up to 100 lists and dicts within one
            another.
        type: what happened, such as ``"order.paid"``; up to 255 printable ASCII characters.
        group: messages of one topic and group are sent in the order of their commits, one at a
            time; up to 150 printable ASCII characters. ``None``: sent in no particular order. The
            next transaction that publishes to the group waits until this one has ended.
        dedup_id: only the first message with this id is accepted in the topic. The id is taken
            until that message is purged, which is ``RETENTION`` after it was sent, or until it is
            discarded. Later, the same id is that of a new message. While it is taken, another type,
            group or data under it is an error.

    Returns:
        The id of the message, or of the earlier accepted message.

    Raises:
        ImproperlyConfigured: no transaction is open on the database of messaging, or there is no
            such topic.
        TypeError: the data is not what JSON gives back as it was: bytes, tuples and keys that are
            no texts are not.
        ValueError: another argument cannot be used, or an id is that of another message.
    """
    _refuse_unfit("type", type, 255)
    if group:
        _refuse_unfit("group", group, 150)
    if dedup_id is not None and not isinstance(dedup_id, str):
        raise TypeError(f"The dedup_id {dedup_id!r} is not a string. Pass a string.")
    name, execution = topics.topic(topic).name, current_execution()
    row = OutboxMessage(
        topic=name,
        stream=f"{name}/{group}" if group else "",
        type=type,
        group=group or "",
        payload=_payload(type, data),
        process_after=DatabaseNow(),
        caused_by=execution.reference if execution else "",
        dedup=None if dedup_id is None else digest(name, dedup_id),
        created_at=DatabaseNow(),
    )
    using = database()
    if not connections[using].in_atomic_block:
        raise ImproperlyConfigured(
            f"A message was published outside of a transaction on the database {using!r}. Call "
            "publish(), after_commit() and enqueue_once() within the transaction.atomic() of the "
            "change. A protected view has no transaction if the client sends no key: give its "
            "policy required=True, or open a transaction."
        )
    if execution or row.dedup:
        _write_once(row, execution)
    else:
        write(row)
    return str(row.message_id)


# What a message says.


def _refuse_unfit(what: str, text: Any, longest: int) -> None:
    """Refuse what cannot be stored, or what no broker could be given."""
    if not isinstance(text, str) or len(text) > longest or not _PRINTABLE.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a valid {what} of a message. Use up to {longest} printable ASCII "
            "characters, such as 'order.paid'."
        )


def as_json(value: Any) -> str:
    """The value as JSON.

    Raises:
        ValueError: it has none, or would read back as something else.
    """
    try:
        text = json.dumps(value, allow_nan=False)
        same = json.loads(text) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not same:
        raise ValueError("JSON would decode it as another value")
    return text


def _payload(kind: str, data: Any) -> str:
    """The data of a message of this type as it is stored."""
    try:
        payload = as_json(data)
    except ValueError as error:
        raise TypeError(
            f"The data of the message {kind!r} is not JSON: {error}. Publish strings, numbers, "
            "lists and dicts with string keys. Encode bytes, for example as Base64."
        ) from error
    validate_nesting(f"The data of the message {kind!r}", data)
    return payload


# The ids of messages.


@dataclass(slots=True)
class _Published:
    """The messages that one attempt has published so far."""

    ordinals: Counter[tuple[str, ...]] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)  # whether they were rolled back or not


_published: Final[WeakKeyDictionary[ExecutionContext, _Published]] = WeakKeyDictionary()


def _next_id(execution: ExecutionContext, published: _Published, *what: str) -> str | None:
    """The id of the next message of this kind, where another attempt may resume this one.

    It is a UUID (RFC 9562, version 5) of what names the record, the step that runs, the kind of
    message, and how many of that kind the attempt has published in this step. An attempt that is
    resumed gives its messages the same ids. What a rollback undoes is not counted. Elsewhere, a
    rollback takes the message back where it takes the claim back, so each message is a new one.

    Args:
        execution: the attempt.
        published: what it has published so far.
        what: the topic, the type, the group and the dedup id.
    """
    ordinals, kind = published.ordinals, (current_step(), *what)
    ordinal = ordinals[kind]
    ordinals[kind] += 1
    on_rollback(database(), partial(ordinals.subtract, [kind]))
    return execution.derive_id("\0".join((*kind, str(ordinal))))


def uuid7() -> str:
    """A UUID (RFC 9562, version 7): unique, and in the order of time for the index's sake."""
    random = secrets.token_hex(9)
    return str(uuid.UUID(f"{time.time_ns() // 1_000_000:012x}7{random[:3]}8{random[3:]}"))


# What is written.


def write(row: OutboxMessage) -> None:
    """Write a message that cannot exist yet, with an id and the next number of its group."""
    row.message_id = row.message_id or uuid7()
    row.sequence = _next_sequence(row.stream) if row.stream else 0
    OutboxMessage.objects.using(database()).bulk_create([row])


def _write_once(row: OutboxMessage, execution: ExecutionContext | None) -> None:
    """Write a message unless it exists; it then gets the id of the existing one.

    Raises:
        ValueError: the existing message differs, so this one would be lost.
    """
    published = _published.setdefault(execution, _Published()) if execution else _Published()
    while True:
        derived = None
        if execution:
            what = (row.topic, row.type, row.group, row.dedup or "")
            derived = _next_id(execution, published, *what)
        row.message_id = derived or uuid7()
        if derived is None and row.dedup is None:
            return write(row)
        try:
            with transaction.atomic(using=database()):  # the number is given back with it
                write(row)
        except IntegrityError:
            if row.message_id in published.ids:
                continue
            first = _existing(row)
            if first is None:
                raise  # another error, or it was purged at the same time
            break
        published.ids.add(row.message_id)
        return None
    if _content(first) != _content(row):
        if first.message_id != row.message_id:
            raise ValueError(
                f"The dedup_id of {row.type!r} is already used by the message {first.message_id!r} "
                "with different content, so this message would be lost. Use a different dedup_id "
                "for each type, group and data."
            )
        logger.error(
            "The message %s of the topic %r was not changed: an earlier attempt published it "
            "with other data. If this is another message, it is lost. Give each a dedup_id.",
            first.message_id,
            first.topic,
        )
    row.message_id = first.message_id
    return None


def _existing(row: OutboxMessage) -> OutboxMessage | None:
    """The message that kept this one from being written: it has its id, or its dedup id."""
    using = database()
    same = Q(message_id=row.message_id)
    if row.dedup:
        same |= Q(dedup=row.dedup)
    rows = OutboxMessage.objects.using(using).filter(same)
    if connections[using].vendor == "mysql":
        rows = rows.select_for_update()  # a snapshot that is older than the message has no such row
    return rows.only("message_id", "topic", "type", "group", "payload").first()


def _content(row: OutboxMessage) -> tuple[Any, ...]:
    """The content of a message for comparison; the order of keys in its data does not matter."""
    return row.type, row.group, canonical(json.loads(row.payload))


def _next_sequence(stream: str) -> int:
    """The next number of a stream, which is locked until the commit."""
    connection = connections[database()]
    is_mysql = connection.vendor == "mysql"
    quote = connection.ops.quote_name
    statement = (_NUMBER_MYSQL if is_mysql else _NUMBER).format(
        table=quote(OutboxStream._meta.db_table),
        stream=quote("stream"),
        last=quote("last_sequence"),
    )
    with connection.cursor() as cursor:
        cursor.execute(statement, [stream])
        return int(cursor.lastrowid if is_mysql else cursor.fetchone()[0])
