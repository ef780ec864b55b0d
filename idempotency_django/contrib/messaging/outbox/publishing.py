"""Publishing: a message that is sent if, and only if, the transaction around it is committed."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Final
from weakref import WeakKeyDictionary

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, connections, transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.db.models.constants import OnConflict
from django.db.models.sql import InsertQuery

from ....conf import is_duration
from ....engine import ExecutionContext, current_execution, current_step
from ....models import DatabaseNow, unlocked
from ....policy import canonical, digest
from ...concurrency.locks import on_rollback
from ..databases import database
from ..events import validate_nesting
from ..models import OutboxMessage, OutboxStream
from .topics import topic


@dataclass(slots=True)
class _Published:
    """The messages that one attempt has published so far."""

    ordinals: Counter[tuple[str, ...]] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)


_published: Final[WeakKeyDictionary[ExecutionContext, _Published]] = WeakKeyDictionary()


def next_id(execution: ExecutionContext, using: str, *what: str) -> str:
    """The id of the next message of this kind that the attempt publishes.

    Where another attempt may resume this one, it is a UUID (RFC 9562, version 5) of what names the
    record, the step that runs, the kind of message, and how many of that kind the attempt has
    published in this step. An attempt that is resumed gives its messages the same ids. What a
    rollback undoes is not counted. Elsewhere, a rollback takes the message back where it takes the
    claim back, so each message is a new one.

    Args:
        execution: the attempt.
        using: the database that the message is written to.
        what: the topic, the type and the group.
    """
    published = _published.setdefault(execution, _Published())
    kind = (current_step(), *what)
    ordinal = published.ordinals[kind]
    published.ordinals[kind] += 1
    on_rollback(using, partial(published.ordinals.subtract, [kind]))
    return execution.derive_id("\0".join((*kind, str(ordinal)))) or uuid7()


def published_by(execution: ExecutionContext) -> set[str]:
    """The ids of what this attempt has published, whether it was rolled back or not."""
    return _published.setdefault(execution, _Published()).ids


def uuid7() -> str:
    """A UUID (RFC 9562, version 7): unique, and in the order of time for the index's sake."""
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = milliseconds << 80 | 0x7 << 76 | (random >> 68 & 0xFFF) << 64
    return str(uuid.UUID(int=value | 0b10 << 62 | random & (1 << 62) - 1))


LONGEST: Final = timedelta(days=3660)
"""The longest delay and window."""

MAX_PAYLOAD: Final = 4 * 1024 * 1024
"""The most characters in the data of a message, as JSON or Base64: a transport takes 5 MiB,
including the envelope.
"""

MAX_HEADERS: Final = 32 * 1024
"""The most characters in the names and values of its headers: a transport takes 64 KiB, including
the envelope.
"""

_TYPE: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,255}")
_GROUP: Final = re.compile(r"[!-~]([ -~]{0,148}[!-~])?", re.ASCII)
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)  # RFC 9110's token
_VALUE: Final = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]*")


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


def refuse_unfit(
    kind: Any,
    group: Any,
    headers: Any,
    durations: Mapping[str, timedelta | None],
) -> None:
    """Refuse what cannot be stored, or what no broker could be given.

    Args:
        kind: the type of the message.
        group: its group; ``None`` or empty: it has none.
        headers: its headers.
        durations: its delay and its window, by the name of the argument.

    Raises:
        ValueError: one of them cannot be used.
    """
    if not _is(kind, _TYPE):
        raise ValueError(
            f"{kind!r} is not a valid type of a message. Use 1 to 255 printable characters, such "
            "as 'order.paid'."
        )
    if group and not _is(group, _GROUP):
        raise ValueError(
            f"{group!r} is not a valid group of a message. Use up to 150 printable ASCII "
            "characters, such as 'order-17'."
        )
    is_mapping = isinstance(headers, Mapping)
    if not is_mapping or not all(_is(k, _NAME) and _is(v, _VALUE) for k, v in headers.items()):
        raise ValueError(
            f"{headers!r} are not valid headers of a message. Pass a dict of strings: names as in "
            "HTTP, and values without control characters."
        )
    for name, duration in durations.items():
        if duration is not None and not is_duration(duration, LONGEST):
            raise ValueError(
                f"{name}={duration!r} is not valid for a message. Pass a timedelta from 0 to "
                f"{LONGEST.days} days."
            )


def refuse_large(payload: str, headers: Mapping[str, str]) -> None:
    """Refuse what the transports of the other side would set aside.

    Args:
        payload: the data, as it is stored.
        headers: the headers.

    Raises:
        ValueError: it is too large.
    """
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(
            f"The data of the message has {len(payload):,} characters; {MAX_PAYLOAD:,} is the "
            "limit. Store it elsewhere, and publish its URL or key."
        )
    size = sum(len(name) + len(value) for name, value in headers.items())
    if size > MAX_HEADERS:
        raise ValueError(
            f"The headers of the message have {size:,} characters; {MAX_HEADERS:,} is the limit. "
            "Move them into the data."
        )


def _is(value: Any, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and bool(pattern.fullmatch(value))


_FIELDS: Final = [field for field in OutboxMessage._meta.concrete_fields if not field.primary_key]
_DUPLICATE: Final = 1062  # MariaDB's and MySQL's code for a unique index that has the value

# One statement, so that the first message of a group is like any other. MySQL has no RETURNING.
_NUMBER: Final = """
    INSERT INTO {table} ({stream}, {last}) VALUES (%(stream)s, %(count)s)
    ON CONFLICT ({stream}) DO UPDATE SET {last} = {table}.{last} + %(count)s RETURNING {last}
"""
_NUMBER_MYSQL: Final = """
    INSERT INTO {table} ({stream}, {last}) VALUES (%(stream)s, LAST_INSERT_ID(%(count)s))
    ON DUPLICATE KEY UPDATE {last} = LAST_INSERT_ID({last} + %(count)s)
"""


def insert(rows: Sequence[OutboxMessage], using: str) -> int:
    """Write messages, except those with an existing id or dedup id; return the number written.

    It waits for a transaction that is writing the same id. On MariaDB and MySQL, several rows must
    be new: there, what ignores a duplicate would ignore other errors, too.
    """
    if not rows:
        return 0
    size = connections[using].ops.bulk_batch_size(_FIELDS, [*rows]) or len(rows)
    return sum(_insert(rows[at : at + size], using) for at in range(0, len(rows), size))


def _insert(rows: Sequence[OutboxMessage], using: str) -> int:
    connection = connections[using]
    ignore = None if connection.vendor == "mysql" else OnConflict.IGNORE
    query = InsertQuery(OutboxMessage, on_conflict=ignore)
    query.insert_values(_FIELDS, [*rows])
    written = 0
    with connection.cursor() as cursor:
        for statement, parameters in query.get_compiler(using).as_sql():
            try:
                cursor.execute(statement, parameters)
            except IntegrityError as error:
                if ignore or getattr(error.__cause__, "args", (0,))[0] != _DUPLICATE:
                    raise
                return 0
            written += cursor.rowcount
    return written


def next_sequence(stream: str, using: str, count: int = 1) -> int:
    """The last of the next ``count`` numbers of a stream, which is locked until the commit."""
    connection = connections[using]
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


def release_sequence(stream: str, using: str) -> None:
    """Give the last number of a stream back, which this transaction has taken for nothing."""
    taken = OutboxStream.objects.using(using).filter(stream=stream)
    taken.update(last_sequence=F("last_sequence") - 1)


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


def end_window(dedup: str, using: str) -> None:
    """Let the next message have this dedup id, if the window of the last one is over."""
    over = OutboxMessage.objects.using(using).filter(dedup=dedup, dedup_until__lte=DatabaseNow())
    over.update(dedup=None)


def existing(row: OutboxMessage, using: str) -> OutboxMessage:
    """The message that kept this one from being written: it has its id, or its dedup id.

    Raises:
        IntegrityError: it has been purged since.
    """
    same = Q(message_id=row.message_id)
    if row.dedup:
        same |= Q(dedup=row.dedup)
    found = OutboxMessage.objects.using(using).filter(same)
    if connections[using].vendor == "mysql":
        found = (
            found.select_for_update()
        )  # a snapshot that is older than the message has no such row
    message = found.only("message_id", "topic", "type", "group", "payload", "is_base64").first()
    if message is None:
        raise IntegrityError(
            f"The message {row.message_id!r} was not written, because a message with this id was "
            "purged at the same time. Repeat the transaction."
        )
    return message


logger = logging.getLogger("idempotency_django")


class ContentId(str):
    """A ``dedup_id`` that is made of what is asked for, however the data says it."""

    __slots__ = ()


WINDOW: Final = timedelta(minutes=5)
"""The default window of a message with a ``dedup_id``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message for :func:`publish_many`; the attributes are the arguments of :func:`publish`."""

    topic: str
    data: Any
    type: str
    group: str | None = None
    dedup_id: Any = None
    window: timedelta | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: timedelta | None = None


def publish(
    topic: str,
    data: Any,
    *,
    type: str,  # noqa: A002  # CloudEvents' name for it
    group: str | None = None,
    dedup_id: Any = None,
    window: timedelta | None = None,
    headers: Mapping[str, str] | None = None,
    delay: timedelta | None = None,
    using: str | None = None,
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
        headers: texts for the broker, beside the data; up to 32 KiB.
        delay: send it only after this time. A group waits for it.
        using: the alias of the database; by default ``IDEMPOTENCY["MESSAGING_DATABASE"]``.

    Returns:
        The id of the message, or of the earlier accepted message.

    Raises:
        ImproperlyConfigured: no transaction is open on the database, or there is no such topic.
        TypeError: the data is neither bytes nor what JSON gives back as it was: tuples and keys
            that are no texts are not.
        ValueError: another argument cannot be used, or an id is that of another message.
    """
    message = Message(
        topic=topic,
        data=data,
        type=type,
        group=group,
        dedup_id=dedup_id,
        window=window,
        headers=headers or {},
        delay=delay,
    )
    return publish_many([message], using=using)[0]


async def apublish(topic: str, data: Any, **options: Any) -> str:
    """:func:`publish` for a coroutine, within a transaction that the thread of the database has."""
    return await sync_to_async(publish)(topic, data, **options)


def publish_many(messages: Iterable[Message], *, using: str | None = None) -> list[str]:
    """:func:`publish` for several messages, with fewer statements.

    Groups and ids are locked in one order, so that two transactions that publish to the same
    groups, or with the same ids, in one call each cannot deadlock. Messages of one group keep the
    order that they are given in.

    Returns:
        Their ids, in the order of the messages.

    Raises:
        Exception: what :func:`publish` raises. Let it roll the transaction back.
    """
    using = using or database()
    given = list(messages)
    rows = [_row(message) for message in given]
    refuse_autocommit(using)
    order = sorted(range(len(given)), key=lambda place: _rank(rows[place]))
    if current_execution() or any(row.dedup for row in rows):
        for place in order:
            _write_once(rows[place], given[place], using)
    else:
        _write([rows[place] for place in order], using)
    return [row.message_id for row in rows]


def _rank(row: OutboxMessage) -> tuple[str, ...]:
    """The sort key for locks: messages are locked in this order, and a group keeps its order."""
    return (row.stream,) if row.stream else ("", row.dedup or "")


def _row(message: Message) -> OutboxMessage:
    """The row of a message, without the columns that need a query."""
    group = message.group or ""
    durations = {"delay": message.delay, "window": message.window}
    refuse_unfit(message.type, group, message.headers, durations)
    known, execution = topic(message.topic), current_execution()
    payload, is_base64 = _payload(message)
    refuse_large(payload, message.headers)
    dedup, window = _dedup(message, payload)
    return OutboxMessage(
        topic=known.name,
        stream=f"{known.name}/{group}" if group else "",
        type=message.type,
        group=group,
        payload=payload,
        is_base64=is_base64,
        headers=json.dumps({**message.headers}),
        process_after=DatabaseNow() + message.delay if message.delay else DatabaseNow(),
        caused_by=execution.reference if execution else "",
        dedup=dedup,
        dedup_until=DatabaseNow() + window if window else None,
        created_at=DatabaseNow(),
    )


def _payload(message: Message) -> tuple[str, bool]:
    if isinstance(message.data, bytes):
        return base64.b64encode(message.data).decode(), True
    try:
        payload = as_json(message.data)
    except ValueError as error:
        raise TypeError(
            f"The data of the message {message.type!r} is not JSON: {error}. Publish strings, "
            "numbers, lists and dicts with string keys, or bytes."
        ) from error
    validate_nesting(f"The data of the message {message.type!r}", payload, message.data)
    return payload, False


def _dedup(message: Message, payload: str) -> tuple[str | None, timedelta | None]:
    if message.dedup_id is None and message.window is None:
        return None, None
    window = WINDOW if message.window is None else message.window
    if window <= timedelta(0):
        raise ValueError(f"The window of a message is {window}. Use a duration above 0.")
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


def refuse_autocommit(using: str, function: str = "publish") -> None:
    """Refuse to write to the outbox outside of a transaction.

    Raises:
        ImproperlyConfigured: no transaction is open on the database; the error names the function.
    """
    if not connections[using].in_atomic_block:
        raise ImproperlyConfigured(
            f"{function}() was called outside of a transaction on the database {using!r}. Call it "
            "within the transaction.atomic() of the change. A protected view has no transaction "
            "if the client sends no key: give its policy required=True, or open a transaction."
        )


def _write(rows: list[OutboxMessage], using: str) -> None:
    """Write messages that cannot exist yet."""
    for stream, group in groupby(rows, key=attrgetter("stream")):
        numbered = list(group)
        first = next_sequence(stream, using, len(numbered)) - len(numbered) + 1 if stream else 0
        for place, row in enumerate(numbered):
            row.message_id = uuid7()
            row.sequence = first + place if stream else 0
    insert(rows, using)


def _write_once(row: OutboxMessage, given: Message, using: str) -> None:
    """Write a message unless it exists; return the id of the existing one.

    Raises:
        ValueError: the existing message differs, so this one would be lost.
    """
    execution = current_execution()
    if row.dedup:
        end_window(row.dedup, using)
    if row.stream:
        row.sequence = next_sequence(row.stream, using)
    while True:
        what = (row.topic, row.type, row.group)
        row.message_id = next_id(execution, using, *what) if execution else uuid7()
        if insert([row], using):
            if execution:
                published_by(execution).add(row.message_id)
            return
        if not execution or row.message_id not in published_by(execution):
            break
    if row.stream:
        release_sequence(row.stream, using)
    first = existing(row, using)
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


def _content(row: OutboxMessage) -> tuple[Any, ...]:
    """The content of a message for comparison; the order of keys in its data does not matter."""
    data = row.payload if row.is_base64 else canonical(json.loads(row.payload))
    return row.type, row.group, row.is_base64, data
