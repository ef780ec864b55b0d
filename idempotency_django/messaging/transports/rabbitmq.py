"""Consumers of RabbitMQ, on kombu: the extra ``[rabbitmq]``."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from itertools import count
from typing import Any, ClassVar, Final, Unpack

from django.core.exceptions import ImproperlyConfigured
from kombu import Connection, Queue
from kombu import Consumer as Subscription
from kombu.message import Message

from ..consumers import Consumer
from .base import Transport
from .incoming import Incoming
from .options import Chosen, Options
from .running import BEAT, Loop

POLL: Final = 1.0  # seconds
_AT_ONCE: Final = 0.005  # seconds: for what is there already
_NOT_FOUND: Final = 404
_BROKERS: Final = "x-"
"""What the names of headers begin with that a broker adds, such as ``x-delivery-count``."""


def run(
    consumer: Consumer,
    queue: str,
    *,
    url: str,
    prefetch: int | None = None,
    heartbeat: float = 30,
    connection: Mapping[str, Any] | None = None,
    **options: Unpack[Options],
) -> None:
    """Handle the messages of a queue until SIGTERM.

    A message is acknowledged after what it asked for is committed. One that fails is kept by this
    process until its next attempt: a quorum queue gives up a message that is returned too often.

    Args:
        consumer: the consumer.
        queue: the queue, which must exist.
        url: where RabbitMQ is, such as ``amqp://user:password@host:5672/vhost``.
        prefetch: how many messages RabbitMQ sends ahead; by default twice the batch, at least 10.
        heartbeat: seconds, 3 or more; after twice as many without a word, the two sides take each
            other for dead.
        connection: further arguments for ``kombu.Connection``, such as ``{"ssl": True}``.
        options: see :class:`~idempotency_django.messaging.transports.options.Options`.

    Raises:
        ImproperlyConfigured: an option cannot be used, or there is no such queue.
        UnknownEventType: there is no handler for an event, with ``unknown="stop"``.
    """
    chosen = Chosen(**options)
    ahead = max(10, 2 * chosen.batch) if prefetch is None else prefetch
    if ahead < chosen.batch:
        raise ImproperlyConfigured(f"prefetch is {ahead}; make it {chosen.batch} (batch) or more.")
    if heartbeat < 3 * BEAT:
        raise ImproperlyConfigured(f"heartbeat is {heartbeat}; make it {3 * BEAT:g} or more.")
    arguments = {"heartbeat": heartbeat, **(connection or {})}
    Loop(RabbitMQ(queue, url, ahead, arguments), consumer, chosen).run()


class RabbitMQ(Transport):
    """A subscription to one queue.

    Args:
        queue: the queue.
        url: where RabbitMQ is.
        prefetch: how many messages it sends ahead.
        arguments: further arguments for ``kombu.Connection``.
    """

    name: ClassVar[str] = "RabbitMQ"
    lost: ClassVar[tuple[type[BaseException], ...]] = (
        *Connection("amqp://").connection_errors,
        *Connection("amqp://").channel_errors,
    )

    def __init__(self, queue: str, url: str, prefetch: int, arguments: Mapping[str, Any]) -> None:
        self._queue = queue
        self._prefetch = prefetch
        self._connection = Connection(url, **arguments)
        self._subscription: Subscription | None = None
        self._arrived: deque[Message] = deque()
        self._postponed: list[tuple[float, int, Incoming]] = []
        self._numbers = count()

    def open(self) -> None:
        self._connection.connect()
        channel = self._connection.channel()
        queue = Queue(self._queue, channel=channel)
        try:
            queue.queue_declare(passive=True)
        except self._connection.channel_errors as error:
            if getattr(error, "code", None) != _NOT_FOUND:
                raise
            raise ImproperlyConfigured(
                f"RabbitMQ has no queue {self._queue!r}: {error}. Declare it first, with its "
                "bindings and its dead-letter exchange."
            ) from error
        self._subscription = Subscription(
            channel,
            [queue],
            auto_declare=False,
            on_message=self._arrived.append,
            on_decode_error=lambda message, _: self._arrived.append(message),  # see _error()
            prefetch_count=self._prefetch,
        )
        self._subscription.consume()

    def fetch(self, limit: int) -> list[Incoming]:
        now = time.monotonic()
        due: list[Incoming] = []
        while self._postponed and self._postponed[0][0] <= now and len(due) < limit:
            due.append(heapq.heappop(self._postponed)[2])
        if due:
            return due
        if not self._arrived:
            next_due = self._postponed[0][0] - now if self._postponed else POLL
            self._drain(min(POLL, next_due))
        while len(self._arrived) < limit and self._drain(_AT_ONCE):
            pass
        self._connection.heartbeat_check()
        taken = min(limit, len(self._arrived))
        return [self._incoming(self._arrived.popleft()) for _ in range(taken)]

    def beat(self, messages: Sequence[Incoming]) -> None:
        self._drain(_AT_ONCE)  # reads the other side's heartbeats as well
        self._connection.heartbeat_check()

    def acknowledge(self, messages: Sequence[Incoming]) -> None:
        for message in messages:
            message.native.ack()

    def postpone(self, message: Incoming, seconds: float) -> None:
        again = replace(message, redelivered=True)
        heapq.heappush(self._postponed, (time.monotonic() + seconds, next(self._numbers), again))

    def reject(self, message: Incoming, error: Exception) -> None:
        message.native.reject()  # to the queue's dead-letter exchange

    def release(self, messages: Sequence[Incoming]) -> None:
        """Nothing to do: they are given back with the channel."""

    def close(self) -> None:
        self._arrived.clear()
        self._postponed.clear()
        self._subscription = None
        self._connection.release()

    def _drain(self, seconds: float) -> bool:
        """Wait for the broker; whether it has sent anything."""
        with suppress(TimeoutError):
            self._connection.drain_events(timeout=max(_AT_ONCE, seconds))
            return True
        return False

    def _incoming(self, message: Message) -> Incoming:
        told, headers = message.delivery_info or {}, dict(message.headers or {})
        body = message.body or b""
        body = body.encode() if isinstance(body, str) else bytes(body)
        redelivered = bool(told.get("redelivered")) or bool(headers.get("x-delivery-count"))
        return Incoming(
            place=f"{self._queue}/{_identified(message, headers, body)}",
            body=body,
            headers=[*headers.items(), ("content-type", message.content_type)],
            redelivered=redelivered,
            native=message,
            error=_error(message),
        )


def _error(message: Message) -> Exception | None:
    """Why kombu could not read the body; its own error would be raised out of the loop."""
    if not message.errors:
        return None
    how = (message.headers or {}).get("compression")
    return ValueError(
        f"The body is not compressed as its header compression={how!r} says: "
        f"{message.errors[0][1]!r}"
    )


def _identified(message: Message, headers: Mapping[str, Any], body: bytes) -> str:
    """What a message is known by: a delivery tag is another one at each delivery.

    Its id alone will not do: some senders give all of their messages one.
    """
    own = sorted((name, str(value)) for name, value in headers.items() if name[:2] != _BROKERS)
    digest = sha256(repr((own, message.content_type)).encode(errors="replace") + body).hexdigest()
    return f"{(message.properties or {}).get('message_id') or ''}#{digest}"
