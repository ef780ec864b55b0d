"""Publishing: a message that is sent if, and only if, the transaction around it is committed."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ...engine.context import current_execution
from ...models import DatabaseNow
from ...policy.canonical import canonical, digest
from ..databases import database
from ..envelopes import refuse_deep
from ..models import OutboxMessage
from .arguments import as_json, refuse_large, refuse_unfit
from .identity import next_id, published_by, uuid7
from .topics import topic
from .waking import wake_relays
from .writing import end_window, existing, insert, next_sequence, schedule, take_back

logger = logging.getLogger("idempotency_django")

CONTENT: Final = object()
"""The ``dedup_id`` of a message that is recognised by its type, group and data."""


class ContentId(str):
    """A ``dedup_id`` that is made of what is asked for, however the data says it."""

    __slots__ = ()


WINDOW: Final = timedelta(minutes=5)
"""The window of a message with a ``dedup_id``, if it names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What :func:`publish_many` publishes; the attributes are the arguments of :func:`publish`."""

    topic: str
    data: Any
    type: str
    group: str | None = None
    dedup_id: Any = None
    window: timedelta | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    message_id: str | None = None
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
    message_id: str | None = None,
    delay: timedelta | None = None,
    using: str | None = None,
) -> str:
    """Have a relay send a message once the transaction is committed. ::

        with transaction.atomic():
            order.pay()
            publish("orders", {"id": order.pk}, type="order.paid", group=f"order-{order.pk}")

    It is sent at least once if the transaction commits, and not at all if it rolls back. Each time
    it has the same id, by which a :class:`~idempotency_django.messaging.consumers.Consumer`
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
            :data:`CONTENT`: the id is made of type, group and data, as if it were omitted.
        window: how long; by default five minutes if there is a ``dedup_id``.
        headers: texts for the broker, beside the data; up to 32 KiB.
        message_id: an id of your own, up to 255 visible ASCII characters; the message is dropped if
            the topic still has it, and refused if another message has the id.
        delay: send it only after this time. A group waits for it.
        using: the alias of the database; by default ``IDEMPOTENCY["MESSAGING_DATABASE"]``.

    Returns:
        The id of the message, or of the one that was accepted before.

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
        message_id=message_id,
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
    if current_execution() or any(m.message_id or rows[at].dedup for at, m in enumerate(given)):
        for place in order:
            _write_once(rows[place], given[place], using)
    else:
        _write([rows[place] for place in order], using)
    if any(topic(message.topic).notify for message in given):
        wake_relays(using)
    return [row.message_id for row in rows]


def _rank(row: OutboxMessage) -> tuple[str, ...]:
    """What a message locks is locked in this order; those of a group keep theirs."""
    return (row.stream,) if row.stream else ("", row.dedup or "", row.message_id)


def _row(message: Message) -> OutboxMessage:
    """What is written of a message, as far as it is known without asking the database."""
    group = message.group or ""
    durations = {"delay": message.delay, "window": message.window}
    refuse_unfit(message.type, group, message.headers, message.message_id, durations)
    known, execution = topic(message.topic), current_execution()
    payload, is_base64 = _payload(message)
    refuse_large(payload, message.headers)
    dedup, window = _dedup(message, payload)
    return OutboxMessage(
        message_id=message.message_id or "",
        topic=known.name,
        stream=f"{known.name}/{group}" if group else "",
        type=message.type,
        group=group,
        payload=payload,
        is_base64=is_base64,
        headers=json.dumps({**message.headers}),
        **schedule(known, message.delay),
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
            f"The data of the message {message.type!r} is not JSON: {error}. Publish texts, "
            "numbers, lists and dicts whose keys are texts, or bytes."
        ) from error
    refuse_deep(f"The data of the message {message.type!r}", payload, message.data)
    return payload, False


def _dedup(message: Message, payload: str) -> tuple[str | None, timedelta | None]:
    if message.dedup_id is None and message.window is None:
        return None, None
    window = WINDOW if message.window is None else message.window
    if window <= timedelta(0):
        raise ValueError(f"The window of a message is {window}. Give a duration above 0.")
    if message.dedup_id is None or message.dedup_id is CONTENT:
        return digest(message.topic, message.type, message.group or "", payload), window
    if not isinstance(message.dedup_id, str):
        raise TypeError(
            f"The dedup_id {message.dedup_id!r} is not a text. Pass a text, or CONTENT."
        )
    return dedup_of(message.topic, message.dedup_id), window


def dedup_of(topic: str, dedup_id: str) -> str:
    """What the table has of a ``dedup_id``."""
    return digest(topic, dedup_id)


def refuse_autocommit(using: str, function: str = "publish") -> None:
    """Refuse to write to the outbox outside of a transaction.

    Raises:
        ImproperlyConfigured: no transaction is open on the database; the error names the function.
    """
    if not connections[using].in_atomic_block:
        raise ImproperlyConfigured(
            f"{function}() was called outside of a transaction on the database {using!r}. What it "
            "asks for happens if a change is committed, so both must be written in the same "
            "transaction. Call it within transaction.atomic(), beside the change. A protected view "
            "has no transaction for a client that sends no key: give its policy required=True, or "
            "open one."
        )


def _write(rows: list[OutboxMessage], using: str) -> None:
    """Write messages that nobody can have written before."""
    for stream, group in groupby(rows, key=attrgetter("stream")):
        numbered = list(group)
        first = next_sequence(stream, using, len(numbered)) - len(numbered) + 1 if stream else 0
        for place, row in enumerate(numbered):
            row.message_id = uuid7()
            row.sequence = first + place if stream else 0
    insert(rows, using)


def _write_once(row: OutboxMessage, given: Message, using: str) -> None:
    """Write a message, unless it is there already; its id is the one that is there.

    Raises:
        ValueError: what is there is another message, so this one would get lost.
    """
    message_id, execution = given.message_id, current_execution()
    if row.dedup:
        end_window(row.dedup, using)
    if row.stream:
        row.sequence = next_sequence(row.stream, using)
    while True:
        if not message_id:
            what = (row.topic, row.type, row.group)
            row.message_id = next_id(execution, using, *what) if execution else uuid7()
        if insert([row], using):
            if execution:
                published_by(execution).add(row.message_id)
            return
        if message_id or not execution or row.message_id not in published_by(execution):
            break
    if row.stream:
        take_back(row.stream, using)
    first = existing(row, using)
    if first.topic != row.topic:
        raise ValueError(
            f"A message cannot have the id {first.message_id!r}: a message of the topic "
            f"{first.topic!r} has it. An id names one message of the whole outbox, so put more "
            "into it, such as the topic."
        )
    if _content(first) != _content(row) and not isinstance(given.dedup_id, ContentId):
        if not message_id and first.message_id == row.message_id:
            logger.warning(
                "The message %s of the topic %r is not changed: an earlier attempt has published "
                "it, with another type, group or data.",
                first.message_id,
                first.topic,
            )
        else:
            name, value = ("message_id", message_id) if message_id else ("dedup_id", given.dedup_id)
            raise ValueError(
                f"A message cannot have the {name} {value!r}: a message with other content has it, "
                "so this one would get lost. It stands for one type, one group and one data: put "
                "more into it."
            )
    row.message_id = first.message_id


def _content(row: OutboxMessage) -> tuple[Any, ...]:
    """What a message says; the order of the keys in its data does not matter."""
    data = row.payload if row.is_base64 else canonical(json.loads(row.payload))
    return row.type, row.group, row.is_base64, data
