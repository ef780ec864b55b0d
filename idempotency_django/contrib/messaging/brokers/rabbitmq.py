"""RabbitMQ, and what else kombu speaks to: its publisher and its transport."""

from __future__ import annotations

import bz2
import heapq
import lzma
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from hashlib import sha256
from itertools import count
from typing import Any, ClassVar, Final

import amqp
import kombu
from amqp.exceptions import (
    AccessRefused,
    ChannelError,
    FrameError,
    FrameSyntaxError,
    MessageNacked,
    NotFound,
    RecoverableConnectionError,
)
from amqp.method_framing import frame_handler
from django.core.exceptions import ImproperlyConfigured
from kombu import Connection, Queue
from kombu import Consumer as Subscription
from kombu.transport import pyamqp

from ....conf import seconds_of
from ..consumers import Consumer
from ..databases import reason
from .base import BrokerUnavailable, Outgoing, Publisher, Refused
from .loop import BEAT, NO_DEAD_LETTERS, ConsumerOptions, Incoming, Loop, Transport, as_text


def quorum_queue(name: str) -> kombu.Queue:
    """A durable quorum queue; publishers and consumers declare the same one."""
    return kombu.Queue(name, durable=True, queue_arguments={"x-queue-type": "quorum"})


def topic_exchange(name: str) -> kombu.Exchange:
    """A durable topic exchange, likewise."""
    return kombu.Exchange(name, type="topic", durable=True)


PREFIX: Final = "cloudEvents_"
"""The prefix of the headers that carry an event's attributes: the AMQP binding of CloudEvents."""

_UNFIT: Final = (struct.error, ValueError, TypeError)
"""py-amqp's errors for values that AMQP cannot encode, such as a routing key of more than 255
bytes.
"""


class KombuPublisher(Publisher):
    """Publishes to RabbitMQ, which confirms each message once it is safe in all of its queues.

    A message that no queue gets is a failure, and not lost. Redis and SQS through kombu have no
    such confirmation: there, a message counts as sent when the server has answered.

    Args:
        topic: the topic.
        url: the broker, such as ``"amqp://user:password@host//"``.
        queue: the queue that gets the messages; by default, it has the topic's name.
        exchange: the exchange that gets them instead. Its queues and their bindings are the
            consumers' affair.
        routing_key: with an exchange: the key of a message, in which ``{topic}``, ``{type}`` and
            ``{group}`` are replaced.
        declare: whether to declare the queue or the exchange: a durable quorum queue, a durable
            topic exchange. ``False`` where they exist with other properties.
        mandatory: whether a message without a bound queue is a failure. ``False`` for an exchange
            that can be without queues.
        timeout: how long the broker may take to accept the connection, or a message.
        connection: further arguments of ``kombu.Connection``, such as ``ssl``.

    Raises:
        ValueError: a queue is given together with an exchange.
    """

    def __init__(
        self,
        topic: str,
        *,
        url: str,
        queue: str = "",
        exchange: str = "",
        routing_key: str = "{type}",
        declare: bool = True,
        mandatory: bool = True,
        timeout: timedelta = timedelta(seconds=10),
        connection: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(topic)
        if queue and exchange:
            raise ValueError(
                "it has both a queue and an exchange. Pass only the exchange, and bind the queue "
                "to it in the consumer that declares the queue"
            )
        self._url = url
        self._queue = queue or topic
        self._exchange = exchange
        self._routing_key = routing_key
        self._declare = declare
        self._mandatory = mandatory
        self._timeout = seconds_of("timeout", timeout)
        self._options = dict(connection or {})
        self._connection: kombu.Connection | None = None
        self._producer: kombu.Producer | None = None
        self._returned: list[Exception] = []

    def close(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            connection.collect(socket_timeout=1)  # also where the broker does not answer

    def send(self, message: Outgoing) -> Exception | None:
        try:
            headers, content_type, body = message.event(self.source).to_binary(PREFIX)
        except ValueError as error:
            return error
        properties = {
            "headers": {**message.headers, **headers},
            "content_type": content_type or "application/octet-stream",
            "content_encoding": "binary" if isinstance(message.data, bytes) else "utf-8",
            "message_id": message.message_id,
            "timestamp": int(message.created_at.timestamp()),
        }
        route = self._route(message)
        is_fresh = self._producer is None
        try:
            return self._confirmed(body, route, properties)
        except (OSError, RecoverableConnectionError) as error:
            if is_fresh or isinstance(error, TimeoutError):
                raise
        # The broker may have closed the idle connection.
        return self._confirmed(body, route, properties)

    def _route(self, message: Outgoing) -> dict[str, Any]:
        if not self._exchange:
            return {"exchange": "", "routing_key": self._queue}
        values = {"topic": message.topic, "type": message.type, "group": message.group}
        return {"exchange": self._exchange, "routing_key": self._routing_key.format(**values)}

    def _confirmed(
        self, body: bytes, route: dict[str, Any], properties: dict[str, Any]
    ) -> Exception | None:
        """Send a message, and wait for the broker's word; what it has against the message.

        Raises:
            Exception: the broker cannot be reached.
        """
        self._returned.clear()
        waits: dict[str, Any] = {"timeout": self._timeout, "confirm_timeout": self._timeout}
        producer = self._open()
        try:
            producer.publish(body, mandatory=self._mandatory, **route, **properties, **waits)
        except MessageNacked:
            return Refused(
                "The broker refused the message (basic.nack). Check whether a queue is full."
            )
        except (NotFound, AccessRefused) as error:
            self.close()
            raise BrokerUnavailable(
                f"RabbitMQ has no exchange {self._exchange!r}, or its user has no write "
                f"permission: {error}. Declare the exchange, or grant the permission."
            ) from error
        except (ChannelError, FrameError, FrameSyntaxError) as error:
            self.close()  # as the broker does: it refuses to read the message
            return error
        except _UNFIT as error:
            self.close()  # part of it may have been sent
            return Refused(
                f"AMQP cannot encode the message: {error!r}. Its routing key and each header name "
                "can have at most 255 bytes."
            )
        except BaseException:
            self.close()  # a late answer to this message would be taken for the next one's
            raise
        if self._returned and not self._exchange:
            self.close()
            again = "It is declared again" if self._declare else "Declare it, or leave declare out"
            raise BrokerUnavailable(f"The queue {self._queue!r} no longer exists. {again}.")
        return self._returned.pop() if self._returned else None

    def _open(self) -> kombu.Producer:
        """The producer, on a connection that is open."""
        if self._producer is not None:
            return self._producer
        self._connection = connection = kombu.Connection(
            self._url, connect_timeout=self._timeout, heartbeat=0, **self._options
        )
        confirms = connection.transport.driver_type == "amqp"
        if confirms:
            waits = {"read_timeout": self._timeout, "write_timeout": self._timeout}
            connection.transport_options = {
                **waits,
                **(connection.transport_options or {}),
                "confirm_publish": True,
            }
        try:
            channel = connection.channel()
            if self._declare:
                self._declared()(channel).declare()
        except BaseException:
            self.close()
            raise
        self._producer = kombu.Producer(
            channel, on_return=self._note_returned if confirms else None
        )
        return self._producer

    def _declared(self) -> kombu.Queue | kombu.Exchange:
        if self._exchange:
            return topic_exchange(self._exchange)
        return quorum_queue(self._queue)

    def _note_returned(
        self, error: Exception, exchange: Any, routing_key: str, message: Any
    ) -> None:
        """Called with a message that the broker could route nowhere."""
        self._returned.append(
            Refused(
                f"No queue is bound to the routing key {routing_key!r} of the exchange "
                f"{exchange!r} ({error}), so the message was not delivered. Bind a queue, or set "
                "mandatory=False in the topic's OPTIONS."
            )
        )


POLL: Final = 1.0  # seconds
_NO_WAIT: Final = 0.005  # seconds: for messages that have arrived
_CONFIRM: Final = 30.0  # seconds
_NOT_FOUND: Final = 404
_OTHER: Final = 406  # it exists with other properties
_BROKERS: Final = "x-"
"""The prefix of the headers that a broker adds, such as ``x-delivery-count``."""
_UNREADABLE: Final = "idempotency-unreadable"
"""The header with the raw properties of a message that py-amqp cannot decode."""
_CONTENT_HEADER: Final = 2
"""The type of the frame that carries the properties of a message."""
_PROPERTIES_AT: Final = 12
"""The offset of the properties in the frame."""
_NOT_SENT_ON: Final = frozenset({"application_headers", "expiration", "user_id", "cluster_id"})
"""The properties that would make RabbitMQ refuse or expire a dead letter."""
_ROUTING: Final = frozenset({"CC", "BCC"})
"""The headers that would make RabbitMQ also route it elsewhere."""
_MEMORY: Final = 64 * 1024 * 1024  # bytes that LZMA may take for its dictionary

_INFLATE: Final[Mapping[str, Callable[[], Any]]] = {
    **dict.fromkeys(("gzip", "zlib", "application/x-gzip"), zlib.decompressobj),
    **dict.fromkeys(("bzip2", "bzip", "application/x-bz2"), bz2.BZ2Decompressor),
    **dict.fromkeys(
        ("lzma", "xz", "application/x-lzma"), lambda: lzma.LZMADecompressor(memlimit=_MEMORY)
    ),
}
"""kombu's names of compressions that can be inflated step by step, and so with a limit."""


def run_consumer(
    consumer: Consumer,
    queue: str,
    *,
    url: str,
    prefetch: int | None = None,
    heartbeat: timedelta = timedelta(seconds=30),
    connection: Mapping[str, Any] | None = None,
    dead_letter: str | None = None,
    declare: bool = False,
    bindings: Mapping[str, str] | None = None,
    **options: Any,
) -> None:
    """Handle the messages of a queue until SIGTERM.

    A message is acknowledged after what it asked for is committed. One that fails is kept by this
    process until its next attempt: a quorum queue gives up a message that is returned too often.

    Args:
        consumer: the consumer.
        queue: the queue, which must exist unless it is declared.
        url: where RabbitMQ is, such as ``amqp://user:password@host:5672/vhost``.
        prefetch: how many messages RabbitMQ sends ahead; by default twice the batch, at least 10.
        heartbeat: 3 seconds or more; after twice as many without a word, the two sides take each
            other for dead.
        connection: further arguments for ``kombu.Connection``, such as ``{"ssl": True}``.
        dead_letter: the queue for messages that cannot be handled, which must exist; required where
            ``idempotency_django.contrib.messaging`` is not installed to keep them.
        declare: whether to declare the queue and that of ``dead_letter``, as the publisher of the
            outbox does: durable quorum queues.
        bindings: with ``declare``: topic exchanges, which are declared as well, and the routing key
            by which each is bound to the queue, such as ``{"shop": "order.#"}``.
        options: see :class:`~idempotency_django.contrib.messaging.ConsumerOptions`.

    Raises:
        ImproperlyConfigured: an option cannot be used, there is no such queue, or no place for
            messages that cannot be handled.
        UnknownEventType: there is no handler for an event, with ``unknown="stop"``.
    """
    common = ConsumerOptions(**options)
    ahead = max(10, 2 * common.batch) if prefetch is None else prefetch
    if ahead < common.batch:
        raise ImproperlyConfigured(
            f"prefetch is {ahead}; it must be {common.batch} (batch) or more."
        )
    beat = seconds_of("heartbeat", heartbeat)
    if beat < 3 * BEAT:
        raise ImproperlyConfigured(
            f"heartbeat is {beat:g} seconds; it must be {3 * BEAT:g} or more."
        )
    arguments = {"heartbeat": beat, **(connection or {})}
    if bindings and not declare:
        raise ImproperlyConfigured(
            "bindings= has no effect without declare=True. Pass declare=True."
        )
    declared = (bindings or {}) if declare else None
    transport = RabbitMQ(queue, url, ahead, arguments, dead_letter, common.max_body_bytes, declared)
    Loop(transport, consumer, common).run()


class RabbitMQ(Transport):
    """A subscription to one queue.

    Args:
        queue: the queue.
        url: where RabbitMQ is.
        prefetch: how many messages it sends ahead.
        arguments: further arguments for ``kombu.Connection``.
        dead_letter: the queue for messages that cannot be handled.
        max_body_bytes: how large the body of a message may be once it is inflated.
        bindings: topic exchanges and routing keys, to be declared with the queues; ``None``:
            nothing is declared.
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
        bindings: Mapping[str, str] | None = None,
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
        self._bindings = bindings
        self._subscription: Subscription | None = None
        self._arrived: deque[Any] = deque()
        self._postponed: list[tuple[float, int, Incoming]] = []
        self._numbers = count()

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
                "RabbitMQ already has a queue or exchange with this name and other properties: "
                f"{error}. Delete it when it is empty, or do not declare it."
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

    def validate_dead_letters(self) -> None:
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
        while len(self._arrived) < limit and self._drain(_NO_WAIT):
            pass
        self._connection.heartbeat_check()
        taken = min(limit, len(self._arrived))
        return [self._incoming(self._arrived.popleft()) for _ in range(taken)]

    def beat(self, messages: Sequence[Incoming]) -> None:
        self._drain(_NO_WAIT)  # reads the other side's heartbeats as well
        self._connection.heartbeat_check()

    def acknowledge(self, messages: Sequence[Incoming]) -> None:
        for message in messages:
            message.native.ack()

    def postpone(self, message: Incoming, seconds: float) -> None:
        again = replace(message, redelivered=True)
        heapq.heappush(self._postponed, (time.monotonic() + seconds, next(self._numbers), again))

    def reject(self, message: Incoming, error: Exception) -> None:
        """Send it to the dead-letter queue, and acknowledge it when RabbitMQ has confirmed it.

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

    def close(self) -> None:
        self._arrived.clear()
        self._postponed.clear()
        self._subscription = None
        self._connection.release()

    def _drain(self, seconds: float) -> bool:
        """Wait for the broker; whether it has sent anything."""
        with suppress(TimeoutError):
            self._connection.drain_events(timeout=max(_NO_WAIT, seconds))
            return True
        return False

    def _incoming(self, message: Any) -> Incoming:
        delivery = message.delivery_info or {}
        headers = {as_text(name): value for name, value in message.headers.items()}
        error: Exception | None = None
        if _UNREADABLE in headers:
            error = ValueError(
                "The properties or headers of the message cannot be decoded: they are not UTF-8, "
                f"or not AMQP. The header {_UNREADABLE} has the raw bytes."
            )
        elif compression := headers.get("compression"):
            try:
                message.body = _inflated(message.sent, compression, self._max_body_bytes)
            except ValueError as problem:
                error = problem
        redelivered = bool(delivery.get("redelivered")) or bool(headers.get("x-delivery-count"))
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
            "The compression of the body is not supported: its header is "
            f"compression={as_text(compression)!r}. Send it uncompressed, or use zlib, bzip2 or "
            "lzma."
        )
    inflate = made()
    try:
        inflated: bytes = inflate.decompress(body, at_most + 1)
    except (zlib.error, OSError, lzma.LZMAError, MemoryError, EOFError, ValueError) as error:
        raise ValueError(_not_so_compressed(compression, repr(error))) from None
    if len(inflated) > at_most:
        raise ValueError(
            f"The body of {len(body)} bytes has more than {at_most} bytes after decompression "
            "(max_body_bytes)."
        )
    if not inflate.eof:
        raise ValueError(_not_so_compressed(compression, "its end is missing"))
    return inflated


def _not_so_compressed(compression: str, why: str) -> str:
    return f"The body cannot be decompressed with its header compression={compression!r}: {why}"


def _plain(value: Any) -> Any:
    """A header's value as it came, or as a text if it is a table, a list or the like."""
    return value if isinstance(value, str | bytes | int | float | datetime) else as_text(value)


def _identified(message: _Message, headers: Mapping[str, Any]) -> str:
    """The name of a message: a delivery tag is another one at each delivery.

    Its id alone will not do: some senders give all of their messages one.
    """
    own = sorted((name, as_text(value)) for name, value in headers.items() if name[:2] != _BROKERS)
    content = repr((own, message.content_type)).encode(errors="replace")
    digest = sha256(content + message.sent).hexdigest()
    return f"{(message.properties or {}).get('message_id') or ''}#{digest}"
