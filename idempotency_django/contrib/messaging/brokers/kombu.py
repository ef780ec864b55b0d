"""RabbitMQ, Redis and SQS, by kombu: a publisher; and the source of ``run_consumer`` for the first
two, as kombu raises at what it cannot read of SQS, without a way to set it aside.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from typing import Any, Final

from ....conf import seconds_of
from ....lazy import extra
from ....policy import digest
from ..events import STRUCTURED, Event
from .base import Publisher, Refused
from .loop import POLL, Incoming, as_text

with extra("rabbitmq"):
    import kombu
    from amqp.exceptions import AccessRefused, ChannelError, MessageNacked, NotFound

FIFO: Final = ".fifo"
"""The end of the name of a FIFO queue in SQS."""

_UNFIT_FOR_SQS: Final = frozenset({"InvalidMessageContents", "InvalidParameterValue"})
_SHORT: Final = 128  # characters of an id in SQS
_TIMEOUTS: Final = {
    "amqp": ("read_timeout", "write_timeout"),
    "redis": ("socket_timeout", "socket_connect_timeout"),
}
"""The options of kombu's transports that limit how long a server may be silent."""
_QUICK: Final = 0.005  # seconds
_HEARTBEAT: Final = 30  # seconds
_SILENCE: Final = 10  # seconds that a source waits for a response
_RENEWAL: Final = 60  # seconds after which a source connects to Redis anew


def limit_silence(connection: kombu.Connection, seconds: float) -> None:
    """Have a connection give up a server that is silent for so long, unless its options differ."""
    limits: dict[str, Any] = dict.fromkeys(
        _TIMEOUTS.get(connection.transport.driver_type, ()), seconds
    )
    if connection.transport.driver_type == "sqs":  # botocore would retry for minutes
        once = {"connect_timeout": seconds, "read_timeout": seconds}
        limits["client-config"] = {**once, "retries": {"total_max_attempts": 1}}
    connection.transport_options = {**limits, **(connection.transport_options or {})}


def open_queue(connection: kombu.Connection, name: str) -> None:
    """Take a queue as it is, or declare a durable quorum queue if there is none."""
    queue = kombu.Queue(name, queue_arguments={"x-queue-type": "quorum"})
    try:
        queue(connection.channel()).queue_declare(passive=True)
    except ChannelError:  # 404; any other is raised again
        queue(connection.channel()).queue_declare()


class KombuPublisher(Publisher):
    """Publishes to RabbitMQ, Redis or SQS.

    RabbitMQ confirms a message once it is safe in all of its queues; a message that no queue gets
    is refused. With Redis and SQS, a message counts as sent when the server has responded. In a
    FIFO queue of SQS, a group of the outbox is a group of SQS, and SQS itself drops what is sent a
    second time within five minutes.

    Args:
        topic: the topic.
        url: the broker, such as ``"amqp://user:password@host//"``.
        queue: the queue that gets the messages; by default, it has the topic's name. If there is
            none, RabbitMQ gets a durable quorum queue.
        exchange: the exchange that gets them instead, which must exist; the routing key is the
            message's type.
        timeout: how long the broker may take to accept the connection, or a message.
        connection: further arguments of ``kombu.Connection``, such as ``ssl``.
    """

    def __init__(
        self,
        topic: str,
        *,
        url: str,
        queue: str = "",
        exchange: str = "",
        timeout: timedelta = timedelta(seconds=10),
        connection: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(topic)
        self._url = url
        self._queue = queue or topic
        self._exchange = exchange
        self._timeout = seconds_of("timeout", timeout)
        self._options = dict(connection or {})
        self._connection: kombu.Connection | None = None
        self._producer: kombu.Producer | None = None
        self._returned: list[tuple[Any, ...]] = []  # error, exchange, routing key, message

    def close(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            connection.collect(socket_timeout=1)  # also where the broker does not respond

    def send(self, message: Event) -> None:
        self._returned.clear()
        producer = self._producer or self._open()
        try:
            producer.publish(
                message.to_json().encode(),
                content_type=STRUCTURED,
                content_encoding="utf-8",
                message_id=message.id,
                mandatory=True,
                timeout=self._timeout,
                confirm_timeout=self._timeout,
                **self._route(message),
            )
        except MessageNacked:
            raise Refused(
                "The broker refused the message (basic.nack). Check whether a queue is full."
            ) from None
        except ChannelError:
            self.close()
            raise
        for error, exchange, routing_key, _ in self._returned:  # RabbitMQ could route it nowhere
            if not self._exchange:
                raise LookupError(
                    f"The queue {self._queue!r} no longer exists. It is declared again."
                )
            raise Refused(
                f"No queue is bound to the routing key {routing_key!r} of the exchange "
                f"{exchange!r} ({error}), so the message was not delivered. Bind a queue."
            )

    def is_outage(self, error: Exception) -> bool:
        if isinstance(error, ChannelError):  # such as a message that is too large for RabbitMQ
            return isinstance(error, AccessRefused | NotFound)
        response = getattr(error, "response", None) or {}  # of botocore
        code = response.get("Error", {}).get("Code")
        return code not in _UNFIT_FOR_SQS and super().is_outage(error)

    def _route(self, message: Event) -> dict[str, Any]:
        if self._exchange:
            return {"exchange": self._exchange, "routing_key": message.type}
        route = {"exchange": "", "routing_key": self._queue}
        if self._queue.endswith(FIFO):
            route["MessageGroupId"] = _fit(message.subject or message.id)
            route["MessageDeduplicationId"] = _fit(message.id)
        return route

    def _open(self) -> kombu.Producer:
        connection: Any = kombu.Connection(
            self._url, connect_timeout=self._timeout, heartbeat=0, **self._options
        )
        self._connection, on_return = connection, None
        limit_silence(connection, self._timeout)
        if connection.transport.driver_type == "amqp":
            connection.transport_options["confirm_publish"] = True
            on_return = self._note_returned
        if not self._exchange:
            open_queue(connection, self._queue)
        self._producer = kombu.Producer(connection.channel(), on_return=on_return)
        return self._producer

    def _note_returned(self, *returned: Any) -> None:
        self._returned.append(returned)


def _fit(text: str) -> str:
    """The text as an id of SQS, different for different texts."""
    fits = len(text) <= _SHORT and text.isascii() and text.isprintable() and " " not in text
    return text if fits else digest(text)


class KombuSource:
    """A queue, from which one message at a time is in hand.

    Args:
        url: the broker.
        queue: the queue.
        options: kombu's ``transport_options``.
    """

    def __init__(self, url: str, queue: str, options: Mapping[str, Any]) -> None:
        self.place = queue
        connection = kombu.Connection(url, heartbeat=_HEARTBEAT)
        connection.transport_options = dict(options)
        limit_silence(connection, _SILENCE)  # which imports the client library
        self._connection: Any = connection
        self._arrived: deque[Any] = deque()
        self._renewed_at = 0.0  # by time.monotonic()

    def open(self) -> None:
        self._arrived.clear()
        self._renewed_at = time.monotonic()
        self._connection = self._connection.clone()  # Redis' cannot be used again after an error
        open_queue(self._connection, self.place)
        channel: Any = self._connection.channel()
        channel.Message = type("Message", (_MessageAsSent, channel.Message), {})
        kombu.Consumer(
            channel,
            [kombu.Queue(self.place)],
            auto_declare=False,
            on_message=self._arrived.append,
            prefetch_count=1,
        ).consume()

    def receive(self) -> Incoming | None:
        is_redis = self._connection.transport.driver_type == "redis"
        if is_redis and time.monotonic() > self._renewed_at + _RENEWAL:
            # A connection without heartbeats may be dead, and look like one where nothing comes.
            self.close()
            self.open()
        self._drain(POLL)
        return self._incoming(self._arrived.popleft()) if self._arrived else None

    def beat(self) -> None:
        if self._connection.supports_heartbeats:
            self._drain(_QUICK)  # reads the broker's heartbeats

    def close(self) -> None:
        self._connection.release()

    def _drain(self, seconds: float) -> None:
        with suppress(TimeoutError):
            self._connection.drain_events(timeout=seconds)
        self._connection.heartbeat_check()

    def _incoming(self, message: Any) -> Incoming:
        headers = [(as_text(name), value) for name, value in message.headers.items()]
        body = message.body or b""
        own = sorted(
            (name, as_text(value)) for name, value in headers if not name.startswith("x-")
        )  # the broker adds those
        return Incoming(
            place=f"{self.place}/{sha256(repr(own).encode(errors='replace')).hexdigest()}",
            body=body.encode() if isinstance(body, str) else bytes(body),
            headers=[*headers, ("content-type", message.content_type)],
            redelivered=bool(message.delivery_info.get("redelivered")),
            acknowledge=message.ack,
        )


class _MessageAsSent:
    """A message whose body kombu leaves as it came: it would inflate it without any limit."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.errors: list[Any] = [None]  # for kombu, something is wrong with it
        super().__init__(*arguments, **options)
        self.errors = []
