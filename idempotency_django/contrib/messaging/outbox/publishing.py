"""Publishing: a message that is sent if, and only if, the transaction around it is committed."""

from __future__ import annotations

import base64
import json
import logging
import re
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Final
from weakref import WeakKeyDictionary

from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, connections, transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from ....conf import is_duration
from ....engine import ExecutionContext, current_execution, current_step
from ....models import DatabaseNow, unlocked
from ....policy import canonical, digest
from ...concurrency.locks import on_rollback
from ..databases import database
from ..events import validate_nesting
from ..models import OutboxMessage, OutboxStream
from .topics import topic

logger = logging.getLogger("idempotency_django")

WINDOW: Final = timedelta(minutes=5)
"""The default window of a message with a ``dedup_id``."""

LONGEST: Final = timedelta(days=3660)
"""The longest window."""

MAX_PAYLOAD: Final = 4 * 1024 * 1024
"""The most characters in the data of a message, as JSON or Base64: a transport takes 5 MiB,
including the envelope.
"""

LONGEST_TYPE: Final = 255
"""The most bytes in the type of a message, which is the routing key of an exchange."""

_TYPE: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
_GROUP: Final = re.compile(r"[!-~]([ -~]{0,148}[!-~])?", re.ASCII)

# One statement, so that the first message of a group is like any other. MySQL has no RETURNING.
_NUMBER: Final = """
    INSERT INTO {table} ({stream}, {last}) VALUES (%(stream)s, %(count)s)
    ON CONFLICT ({stream}) DO UPDATE SET {last} = {table}.{last} + %(count)s RETURNING {last}
"""
_NUMBER_MYSQL: Final = """
    INSERT INTO {table} ({stream}, {last}) VALUES (%(stream)s, LAST_INSERT_ID(%(count)s))
    ON DUPLICATE KEY UPDATE {last} = LAST_INSERT_ID({last} + %(count)s)
"""


class ContentId(str):
    """A ``dedup_id`` that is made of what is asked for, however the data says it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message for :func:`publish_many`; the attributes are the arguments of :func:`publish`."""

    topic: str
    data: Any
    type: str
    group: str | None = None
    dedup_id: Any = None
    window: timedelta | None = None


def publish(
    topic: str,
    data: Any,
    *,
    type: str,  # noqa: A002  # CloudEvents' name for it
    group: str | None = None,
    dedup_id: Any = None,
    window: timedelta | None = None,
) -> str:
    """Have a relay send a message once the transaction is committed. ::

        with transaction.atomic():
            order.pay()
            publish("orders", {"id": order.pk}, type="order.paid", group=f"order-{order.pk}")

    It is sent at least once if the transaction commits, and not at all if it rolls back. Each time
    it has the same id, by which a :class:`~idempotency_django.contrib.messaging.Consumer`
    recognises it. An attempt that is resumed publishes nothing a second time; a key that is used
    again after its record is gone publishes new messages.

    Args:
        topic: a topic of ``IDEMPOTENCY["OUTBOX"]``.
        data: what JSON can say and gives back as it was, or bytes: up to 4 MiB, as JSON or Base64,
            and up to 100 lists and dicts within one another.
        type: what happened, such as ``"order.paid"``.
        group: messages of one topic and group are sent in the order of their commits, one at a
            time; up to 150 printable ASCII characters. ``None``: sent in no particular order. The
            next transaction that publishes to the group waits until this one has ended.
        dedup_id: within the window, only the first message with this id is accepted in the topic;
            it is an error to publish another type, group or data under it.
        window: how long; by default five minutes if there is a ``dedup_id``. Without one, the type,
            the group and the data are the id.

    Returns:
        The id of the message, or of the earlier accepted message.

    Raises:
        ImproperlyConfigured: no transaction is open on the database of messaging, or there is no
            such topic.
        TypeError: the data is neither bytes nor what JSON gives back as it was: tuples and keys
            that are no texts are not.
        ValueError: another argument cannot be used, or an id is that of another message.
    """
    message = Message(
        topic=topic, data=data, type=type, group=group, dedup_id=dedup_id, window=window
    )
    return publish_many([message])[0]


def publish_many(messages: Iterable[Message]) -> list[str]:
    """:func:`publish` for several messages, with fewer statements.

    Groups and ids are locked in one order, so that two transactions that publish to the same
    groups, or with the same ids, in one call each cannot deadlock. Messages of one group keep the
    order that they are given in.

    Returns:
        Their ids, in the order of the messages.

    Raises:
        Exception: what :func:`publish` raises. Let it roll the transaction back.
    """
    given = list(messages)
    rows = [_row(message) for message in given]
    refuse_autocommit()
    order = sorted(range(len(given)), key=lambda place: _rank(rows[place]))
    if current_execution() or any(row.dedup for row in rows):
        for place in order:
            _write_once(rows[place], given[place])
    else:
        write([rows[place] for place in order])
    return [row.message_id for row in rows]


def _rank(row: OutboxMessage) -> tuple[str, ...]:
    """The sort key for locks: messages are locked in this order, and a group keeps its order."""
    return (row.stream,) if row.stream else ("", row.dedup or "")


def refuse_autocommit(function: str = "publish") -> None:
    """Refuse to write to the outbox outside of a transaction.

    Raises:
        ImproperlyConfigured: no transaction is open on the database; the error names the function.
    """
    using = database()
    if not connections[using].in_atomic_block:
        raise ImproperlyConfigured(
            f"{function}() was called outside of a transaction on the database {using!r}. Call it "
            "within the transaction.atomic() of the change. A protected view has no transaction "
            "if the client sends no key: give its policy required=True, or open a transaction."
        )


# What a message says.


def _row(message: Message) -> OutboxMessage:
    """The row of a message, without the columns that need a query."""
    _refuse_unfit(message)
    group = message.group or ""
    known, execution = topic(message.topic), current_execution()
    payload, is_base64 = _payload(message)
    dedup, window = _dedup(message, payload)
    return OutboxMessage(
        topic=known.name,
        stream=f"{known.name}/{group}" if group else "",
        type=message.type,
        group=group,
        payload=payload,
        is_base64=is_base64,
        process_after=DatabaseNow(),
        caused_by=execution.reference if execution else "",
        dedup=dedup,
        dedup_until=DatabaseNow() + window if window else None,
        created_at=DatabaseNow(),
    )


def _refuse_unfit(message: Message) -> None:
    """Refuse what cannot be stored, or what no broker could be given."""
    if not _is(message.type, _TYPE) or len(message.type.encode()) > LONGEST_TYPE:
        raise ValueError(
            f"{message.type!r} is not a valid type of a message. Use printable characters, up to "
            f"{LONGEST_TYPE} bytes in UTF-8, such as 'order.paid'."
        )
    if message.group and not _is(message.group, _GROUP):
        raise ValueError(
            f"{message.group!r} is not a valid group of a message. Use up to 150 printable ASCII "
            "characters, such as 'order-17'."
        )
    window = message.window
    if window is not None and not (is_duration(window, LONGEST) and window):
        raise ValueError(
            f"window={window!r} is not valid for a message. Pass a timedelta above 0, up to "
            f"{LONGEST.days} days."
        )


def _is(value: Any, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and bool(pattern.fullmatch(value))


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


def _payload(message: Message) -> tuple[str, bool]:
    """The data as it is stored, and whether that is Base64."""
    is_base64 = isinstance(message.data, bytes)
    try:
        payload = base64.b64encode(message.data).decode() if is_base64 else as_json(message.data)
    except ValueError as error:
        raise TypeError(
            f"The data of the message {message.type!r} is not JSON: {error}. Publish strings, "
            "numbers, lists and dicts with string keys, or bytes."
        ) from error
    if not is_base64:
        validate_nesting(f"The data of the message {message.type!r}", payload, message.data)
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(
            f"The data of the message has {len(payload):,} characters; {MAX_PAYLOAD:,} is the "
            "limit. Store it elsewhere, and publish its URL or key."
        )
    return payload, is_base64


def _dedup(message: Message, payload: str) -> tuple[str | None, timedelta | None]:
    if message.dedup_id is None and message.window is None:
        return None, None
    window = message.window or WINDOW
    if message.dedup_id is None:
        return digest(message.topic, message.type, message.group or "", payload), window
    if not isinstance(message.dedup_id, str):
        raise TypeError(
            f"The dedup_id {message.dedup_id!r} is not a string. Pass a string, or only a window."
        )
    return dedup_of(message.topic, message.dedup_id), window


def dedup_of(topic: str, dedup_id: str) -> str:
    """The stored form of a ``dedup_id``."""
    return digest(topic, dedup_id)


# The ids of messages.


@dataclass(slots=True)
class _Published:
    """The messages that one attempt has published so far."""

    ordinals: Counter[tuple[str, ...]] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)  # whether they were rolled back or not


_published: Final[WeakKeyDictionary[ExecutionContext, _Published]] = WeakKeyDictionary()


def _published_by(execution: ExecutionContext) -> _Published:
    return _published.setdefault(execution, _Published())


def _next_id(execution: ExecutionContext, *what: str) -> str | None:
    """The id of the next message of this kind, where another attempt may resume this one.

    It is a UUID (RFC 9562, version 5) of what names the record, the step that runs, the kind of
    message, and how many of that kind the attempt has published in this step. An attempt that is
    resumed gives its messages the same ids. What a rollback undoes is not counted. Elsewhere, a
    rollback takes the message back where it takes the claim back, so each message is a new one.

    Args:
        execution: the attempt.
        what: the topic, the type and the group.
    """
    ordinals, kind = _published_by(execution).ordinals, (current_step(), *what)
    ordinal = ordinals[kind]
    ordinals[kind] += 1
    on_rollback(database(), partial(ordinals.subtract, [kind]))
    return execution.derive_id("\0".join((*kind, str(ordinal))))


def uuid7() -> str:
    """A UUID (RFC 9562, version 7): unique, and in the order of time for the index's sake."""
    random = secrets.token_hex(9)
    return str(uuid.UUID(f"{time.time_ns() // 1_000_000:012x}7{random[:3]}8{random[3:]}"))


# What is written.


def write(rows: Sequence[OutboxMessage]) -> None:
    """Write messages that cannot exist yet, with ids and the next numbers of their groups."""
    for stream, group in groupby(rows, key=attrgetter("stream")):
        numbered = list(group)
        first = _next_sequence(stream, len(numbered)) - len(numbered) + 1 if stream else 0
        for place, row in enumerate(numbered):
            row.message_id = row.message_id or uuid7()
            row.sequence = first + place if stream else 0
    OutboxMessage.objects.using(database()).bulk_create(rows)


def _write_once(row: OutboxMessage, given: Message) -> None:
    """Write a message unless it exists; it then gets the id of the existing one.

    Raises:
        ValueError: the existing message differs, so this one would be lost.
    """
    using, execution = database(), current_execution()
    if row.dedup:
        end_window(row.dedup)
    while True:
        derived = _next_id(execution, row.topic, row.type, row.group) if execution else None
        if derived is None and row.dedup is None:
            return write([row])
        row.message_id = derived or uuid7()
        try:
            with transaction.atomic(using=using):  # the number is given back with it
                write([row])
        except IntegrityError:
            if not execution or row.message_id not in _published_by(execution).ids:
                first = _existing(row)
                if first is None:
                    raise  # another error, or it was purged at the same time
                break
        else:
            if execution:
                _published_by(execution).ids.add(row.message_id)
            return None
    if _content(first) != _content(row) and not isinstance(given.dedup_id, ContentId):
        if first.message_id != row.message_id:
            raise ValueError(
                f"The dedup_id {given.dedup_id!r} is already used by a message with different "
                "content, so this message would be lost. Use a different dedup_id for each type, "
                "group and data."
            )
        logger.warning(
            "The message %s of the topic %r was not changed: an earlier attempt published it "
            "with another type, group or data.",
            first.message_id,
            first.topic,
        )
    row.message_id = first.message_id
    return None


def end_window(dedup: str) -> None:
    """Let the next message have this dedup id, if the window of the last one is over."""
    rows = OutboxMessage.objects.using(database())
    rows.filter(dedup=dedup, dedup_until__lte=DatabaseNow()).update(dedup=None)


def _existing(row: OutboxMessage) -> OutboxMessage | None:
    """The message that kept this one from being written: it has its id, or its dedup id."""
    using = database()
    same = Q(message_id=row.message_id)
    if row.dedup:
        same |= Q(dedup=row.dedup)
    rows = OutboxMessage.objects.using(using).filter(same)
    if connections[using].vendor == "mysql":
        rows = rows.select_for_update()  # a snapshot that is older than the message has no such row
    return rows.only("message_id", "topic", "type", "group", "payload", "is_base64").first()


def _content(row: OutboxMessage) -> tuple[Any, ...]:
    """The content of a message for comparison; the order of keys in its data does not matter."""
    data = row.payload if row.is_base64 else canonical(json.loads(row.payload))
    return row.type, row.group, row.is_base64, data


def _next_sequence(stream: str, count: int) -> int:
    """The last of the next ``count`` numbers of a stream, which is locked until the commit."""
    connection = connections[database()]
    is_mysql = connection.vendor == "mysql"
    quote = connection.ops.quote_name
    statement = (_NUMBER_MYSQL if is_mysql else _NUMBER).format(
        table=quote(OutboxStream._meta.db_table),
        stream=quote("stream"),
        last=quote("last_sequence"),
    )
    with connection.cursor() as cursor:
        cursor.execute(statement, {"stream": stream, "count": count})
        return int(cursor.lastrowid if is_mysql else cursor.fetchone()[0])


# The purge of numbers.


def purge_streams(_: timedelta, limit: int) -> int:
    """Delete up to that many numbers of groups without any message; how many there were.

    It is unknown since when a group has none. The next message of such a group has the number 1
    again. A group's last message keeps its number for as long as it is kept itself.
    """
    using = database()
    with transaction.atomic(using=using):
        empty = unlocked(_empty_streams(using).order_by("pk")).values_list("pk", flat=True)
        streams = {*empty[:limit]}
        # Publishers wait for the locks from here on: look again.
        messages = OutboxMessage.objects.using(using).filter(stream__in=streams)
        unused = streams - {*messages.values_list("stream", flat=True)}
        return OutboxStream.objects.using(using).filter(pk__in=unused).delete()[0]


def _empty_streams(using: str) -> QuerySet[OutboxStream]:
    messages = OutboxMessage.objects.using(using).filter(stream=OuterRef("stream"))
    return OutboxStream.objects.using(using).filter(~Exists(messages))
