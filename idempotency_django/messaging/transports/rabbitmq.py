"""Consumers of RabbitMQ, on kombu: the extra ``[rabbitmq]``."""

from __future__ import annotations

import bz2
import heapq
import lzma
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from itertools import count
from typing import Any, ClassVar, Final, Unpack

import amqp
from amqp.method_framing import frame_handler
from django.core.exceptions import ImproperlyConfigured
from kombu import Connection, Queue
from kombu import Consumer as Subscription
from kombu.transport import pyamqp

from ..consumers import Consumer
from ..quorum import quorum_queue, topic_exchange
from ..reasons import reason
from .base import NO_DEAD_LETTERS, Transport
from .incoming import Incoming, as_text
from .options import Chosen, Options
from .running import BEAT, Loop

POLL: Final = 1.0  # seconds
_AT_ONCE: Final = 0.005  # seconds: for what is there already
_CONFIRM: Final = 30.0  # seconds
_NOT_FOUND: Final = 404
_OTHER: Final = 406  # it exists with other properties
_BROKERS: Final = "x-"
"""What the names of headers begin with that a broker adds, such as ``x-delivery-count``."""
_UNREADABLE: Final = "idempotency-unreadable"
"""The header that carries the properties of a message that py-amqp cannot read."""
_CONTENT_HEADER: Final = 2
"""The type of the frame that carries the properties of a message."""
_PROPERTIES_AT: Final = 12
"""Where they begin in it."""
_NOT_SENT_ON: Final = frozenset({"application_headers", "expiration", "user_id", "cluster_id"})
"""Properties for which RabbitMQ would refuse a dead letter, or let it expire."""
_ROUTING: Final = frozenset({"CC", "BCC"})
"""Headers for which RabbitMQ would send it elsewhere as well."""
_MEMORY: Final = 64 * 1024 * 1024  # bytes that LZMA may take for its dictionary

_INFLATE: Final[Mapping[str, Callable[[], Any]]] = {
    **dict.fromkeys(("gzip", "zlib", "application/x-gzip"), zlib.decompressobj),
    **dict.fromkeys(("bzip2", "bzip", "application/x-bz2"), bz2.BZ2Decompressor),
    **dict.fromkeys(
        ("lzma", "xz", "application/x-lzma"), lambda: lzma.LZMADecompressor(memlimit=_MEMORY)
    ),
}
"""kombu's names of compressions that can be inflated step by step, and so with a limit."""


def run(
    consumer: Consumer,
    queue: str,
    *,
    url: str,
    prefetch: int | None = None,
    heartbeat: float = 30,
    connection: Mapping[str, Any] | None = None,
    dead_letter: str | None = None,
    declare: bool = False,
    bindings: Mapping[str, str] | None = None,
    **options: Unpack[Options],
) -> None:
    """Handle the messages of a queue until SIGTERM.

    A message is acknowledged after what it asked for is committed. One that fails is kept by this
    process until its next attempt: a quorum queue gives up a message that is returned too often.

    Args:
        consumer: the consumer.
        queue: the queue, which must exist unless it is declared.
        url: where RabbitMQ is, such as ``amqp://user:password@host:5672/vhost``.
        prefetch: how many messages RabbitMQ sends ahead; by default twice the batch, at least 10.
        heartbeat: seconds, 3 or more; after twice as many without a word, the two sides take each
            other for dead.
        connection: further arguments for ``kombu.Connection``, such as ``{"ssl": True}``.
        dead_letter: the queue for messages that cannot be handled, which must exist; required where
            ``idempotency_django.messaging`` is not installed to keep them.
        declare: whether to declare the queue and that of ``dead_letter``, as the publisher of the
            outbox does: durable quorum queues.
        bindings: with ``declare``: topic exchanges, which are declared as well, and the routing key
            by which each is bound to the queue, such as ``{"shop": "order.#"}``.
        options: see :class:`~idempotency_django.messaging.transports.options.Options`.

    Raises:
        ImproperlyConfigured: an option cannot be used, there is no such queue, or no place for
            messages that cannot be handled.
        UnknownEventType: there is no handler for an event, with ``unknown="stop"``.
    """
    chosen = Chosen(**options)
    ahead = max(10, 2 * chosen.batch) if prefetch is None else prefetch
    if ahead < chosen.batch:
        raise ImproperlyConfigured(f"prefetch is {ahead}; make it {chosen.batch} (batch) or more.")
    if heartbeat < 3 * BEAT:
        raise ImproperlyConfigured(f"heartbeat is {heartbeat}; make it {3 * BEAT:g} or more.")
    arguments = {"heartbeat": heartbeat, **(connection or {})}
    if bindings and not declare:
        raise ImproperlyConfigured("bindings are made with declare=True only. Pass it, too.")
    transport = RabbitMQ(queue, url, ahead, arguments, dead_letter, chosen.max_body_bytes)
    if declare:
        transport.declare(bindings or {})
    Loop(transport, consumer, chosen).run()


class RabbitMQ(Transport):
    """A subscription to one queue.

    Args:
        queue: the queue.
        url: where RabbitMQ is.
        prefetch: how many messages it sends ahead.
        arguments: further arguments for ``kombu.Connection``.
        dead_letter: the queue for messages that cannot be handled.
        max_body_bytes: how large the body of a message may be once it is inflated.
    """

    name: ClassVar[str] = "RabbitMQ"
    lost: ClassVar[tuple[type[BaseException], ...]] = (
        *Connection("amqp://").connection_errors,
        *Connection("amqp://").channel_errors,
    )

    def __init__(
        self,
        queue: str,
        url: str,
        prefetch: int,
        arguments: Mapping[str, Any],
        dead_letter: str | None,
        max_body_bytes: int,
    ) -> None:
        self._queue = queue
        self._prefetch = prefetch
        self._dead_letter = dead_letter
        self._max_body_bytes = max_body_bytes
        self._connection = Connection(url, **arguments)
        self._connection.transport_options = {
            **(self._connection.transport_options or {}),
            "frame_handler": _read_any_properties,
        }
        self._channel: Any = None
        self._bindings: Mapping[str, str] | None = None
        self._subscription: Subscription | None = None
        self._arrived: deque[Any] = deque()
        self._postponed: list[tuple[float, int, Incoming]] = []
        self._numbers = count()

    def declare(self, bindings: Mapping[str, str]) -> None:
        """Have the queues and bindings declared whenever the transport opens."""
        self._bindings = bindings

    def _declare(self, bindings: Mapping[str, str]) -> None:
        channel: Any = self._connection.channel()
        try:
            for name in filter(None, (self._queue, self._dead_letter)):
                quorum_queue(name)(channel).declare()
            for name, key in bindings.items():
                topic_exchange(name)(channel).declare()
                quorum_queue(self._queue)(channel).bind_to(name, routing_key=key)
        except self._connection.channel_errors as error:
            if getattr(error, "code", None) != _OTHER:
                raise
            raise ImproperlyConfigured(
                f"RabbitMQ has a queue or an exchange of that name with other properties: {error}. "
                "Delete it once it is empty, or do not declare it."
            ) from error
        channel.close()

    def open(self) -> None:
        self._connection.connect()
        if self._bindings is not None:
            self._declare(self._bindings)
        channel: Any = self._connection.channel()
        channel.Message = _Message
        self._channel = channel
        queue = Queue(self._queue, channel=channel)
        self._find(queue, "Declare it first (run_consumer --declare), with its bindings.")
        self._subscription = Subscription(
            channel,
            [queue],
            auto_declare=False,
            on_message=self._arrived.append,
            prefetch_count=self._prefetch,
        )
        self._subscription.consume()

    def refuse_loss(self) -> None:
        if self._dead_letter is None:
            raise ImproperlyConfigured(NO_DEAD_LETTERS.format("queue"))
        self._find(Queue(self._dead_letter, channel=self._channel), "Declare it first.")

    def _find(self, queue: Queue, otherwise: str) -> None:
        try:
            queue.queue_declare(passive=True)
        except self._connection.channel_errors as error:
            if getattr(error, "code", None) != _NOT_FOUND:
                raise
            raise ImproperlyConfigured(
                f"RabbitMQ has no queue {queue.name!r}: {error}. {otherwise}"
            ) from error

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
        """Send it to the queue of dead letters, and acknowledge it when RabbitMQ has it there.

        With ``basic.reject``, RabbitMQ would drop it where the queue has no dead-letter exchange.
        """
        native = message.native
        properties = {k: v for k, v in native.properties.items() if k not in _NOT_SENT_ON}
        letter = amqp.Message(
            native.sent,
            **{**properties, "delivery_mode": 2},
            application_headers={
                **{as_text(k): _plain(v) for k, v in native.headers.items() if k not in _ROUTING},
                "dead-letter-reason": reason(error),
            },
        )
        self._channel.basic_publish_confirm(
            letter,
            exchange="",
            routing_key=self._dead_letter,
            mandatory=True,
            confirm_timeout=_CONFIRM,
        )
        native.ack()

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

    def _incoming(self, message: Any) -> Incoming:
        told = message.delivery_info or {}
        headers = {as_text(name): value for name, value in message.headers.items()}
        error: Exception | None = None
        if _UNREADABLE in headers:
            error = ValueError(
                "The properties or headers of the message cannot be read: they are not UTF-8, or "
                f"not AMQP. They are in the header {_UNREADABLE}, as they came."
            )
        elif compression := headers.get("compression"):
            try:
                message.body = _inflated(message.sent, compression, self._max_body_bytes)
            except ValueError as problem:
                error = problem
        redelivered = bool(told.get("redelivered")) or bool(headers.get("x-delivery-count"))
        return Incoming(
            place=f"{self._queue}/{_identified(message, headers)}",
            body=message.body,
            headers=[*headers.items(), ("content-type", message.content_type)],
            redelivered=redelivered,
            native=message,
            error=error,
        )


class _Message(pyamqp.Message):
    """A message whose body kombu leaves as it came: it would inflate it without any limit.

    Attributes:
        body: the body; once it is handed over, inflated.
        sent: the body as it came.
    """

    body: Any

    def __init__(self, message: amqp.Message, channel: Any = None, **more: Any) -> None:
        self.errors = [None]  # for kombu, something is wrong with it, so it leaves the body
        super().__init__(message, channel, **more)
        self.errors = []
        body: Any = self.body or b""
        self.body = self.sent = body.encode() if isinstance(body, str) else bytes(body)


def _read_any_properties(connection: Any, callback: Any) -> Callable[[Any], Any]:
    """py-amqp's handler of frames, for messages with properties that it cannot read, too.

    It would raise in the middle of a message: any sender could end the consumer, again and again.
    """
    handle: Callable[[Any], Any] = frame_handler(connection, callback)

    def on_frame(frame: tuple[int, int, Any]) -> Any:
        kind, channel, buffer = frame
        if kind == _CONTENT_HEADER:
            try:
                properties: Any = amqp.Message()
                properties.inbound_header(buffer)
            except Exception:  # noqa: BLE001  # whatever a stranger can make it raise
                raw = bytes(buffer)
                instead: Any = amqp.Message(application_headers={_UNREADABLE: raw[_PROPERTIES_AT:]})
                buffer = raw[:_PROPERTIES_AT] + instead._serialize_properties()
        return handle((kind, channel, buffer))

    return on_frame


def _inflated(body: bytes, compression: Any, at_most: int) -> bytes:
    """The body, inflated no further than to the limit.

    Raises:
        ValueError: it would be larger, or is not compressed as its header says.
    """
    made = _INFLATE.get(compression) if isinstance(compression, str) else None
    if made is None:
        raise ValueError(
            f"The body is compressed in a way that is not supported: its header is "
            f"compression={as_text(compression)!r}. Send it as it is, or compressed by zlib, bzip2 "
            "or lzma."
        )
    inflate = made()
    try:
        inflated: bytes = inflate.decompress(body, at_most + 1)
    except (zlib.error, OSError, lzma.LZMAError, MemoryError, EOFError, ValueError) as error:
        raise ValueError(_not_so_compressed(compression, repr(error))) from None
    if len(inflated) > at_most:
        raise ValueError(
            f"The body of {len(body)} bytes is larger than {at_most} bytes when it is inflated "
            "(max_body_bytes)."
        )
    if not inflate.eof:
        raise ValueError(_not_so_compressed(compression, "its end is missing"))
    return inflated


def _not_so_compressed(compression: str, why: str) -> str:
    return f"The body is not compressed as its header compression={compression!r} says: {why}"


def _plain(value: Any) -> Any:
    """A header's value as it came, or as a text if it is a table, a list or the like."""
    return value if isinstance(value, str | bytes | int | float | datetime) else as_text(value)


def _identified(message: _Message, headers: Mapping[str, Any]) -> str:
    """What a message is known by: a delivery tag is another one at each delivery.

    Its id alone will not do: some senders give all of their messages one.
    """
    own = sorted((name, as_text(value)) for name, value in headers.items() if name[:2] != _BROKERS)
    told = repr((own, message.content_type)).encode(errors="replace")
    digest = sha256(told + message.sent).hexdigest()
    return f"{(message.properties or {}).get('message_id') or ''}#{digest}"
