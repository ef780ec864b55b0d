"""RabbitMQ, and the other brokers that kombu knows: the extra ``[rabbitmq]``."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

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

from ...quorum import quorum_queue, topic_exchange
from .base import Away, Outgoing, Publisher, Refused
from .lines import Lines

PREFIX: Final = "cloudEvents_"
"""What the headers begin with that carry an event's attributes: the AMQP binding of CloudEvents."""

_UNFIT: Final = (struct.error, ValueError, TypeError)
"""What py-amqp raises for what AMQP cannot say, such as a routing key of more than 255 bytes."""


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
        mandatory: whether a message that no queue gets is a failure. ``False`` for an exchange that
            nobody may listen to.
        timeout: seconds that the broker may take to accept the connection, or a message.
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
        timeout: float = 10.0,
        connection: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(topic)
        if queue and exchange:
            raise ValueError(
                "it has both a queue and an exchange. Name the exchange only, and bind the queue "
                "to it where the queue's consumer declares it"
            )
        self._url = url
        self._queue = queue or topic
        self._exchange = exchange
        self._routing_key = routing_key
        self._declare = declare
        self._mandatory = mandatory
        self._timeout = timeout
        self._options = dict(connection or {})
        self._connection: kombu.Connection | None = None
        self._producer: kombu.Producer | None = None
        self._returned: list[Exception] = []

    def publish(self, messages: Sequence[Outgoing]) -> list[Exception | None]:
        lines = Lines(messages)
        while lines.heads:
            place = lines.heads[0]
            try:
                error = self.late() or self._send(messages[place])
            except Exception as error:  # noqa: BLE001  # each transport has its own
                lines.give_up(error)
                break
            if error is None:
                lines.confirm(place)
            else:
                lines.fail(place, error)
        return lines.answers

    def close(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            connection.collect(socket_timeout=1)  # also where the broker does not answer

    def _send(self, message: Outgoing) -> Exception | None:
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
        # The broker may have closed the connection, because nobody used it for a while.
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
                "The broker has refused the message (basic.nack). Is one of its queues full?"
            )
        except (NotFound, AccessRefused) as error:
            self.close()
            raise Away(
                f"RabbitMQ has no exchange {self._exchange!r}, or its user may not write to it: "
                f"{error}. Declare the exchange, or grant the right."
            ) from error
        except (ChannelError, FrameError, FrameSyntaxError) as error:
            self.close()  # as the broker does: it refuses to read the message
            return error
        except _UNFIT as error:
            self.close()  # part of it may have been sent
            return Refused(
                f"AMQP cannot carry the message: {error!r}. Its routing key and the names of its "
                "headers can have 255 bytes each."
            )
        except BaseException:
            self.close()  # a late answer to this message would be taken for the next one's
            raise
        if self._returned and not self._exchange:
            self.close()
            again = "It is declared again" if self._declare else "Declare it, or leave declare out"
            raise Away(f"RabbitMQ has no queue {self._queue!r} any more. {again}.")
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
        self._producer = kombu.Producer(channel, on_return=self._take_back if confirms else None)
        return self._producer

    def _declared(self) -> kombu.Queue | kombu.Exchange:
        if self._exchange:
            return topic_exchange(self._exchange)
        return quorum_queue(self._queue)

    def _take_back(self, error: Exception, exchange: Any, routing_key: str, message: Any) -> None:
        self._returned.append(
            Refused(
                f"No queue gets the message: RabbitMQ knows none for the routing key "
                f"{routing_key!r} of the exchange {exchange!r} ({error}). Bind a queue to it, or "
                "make the topic's publisher with mandatory=False."
            )
        )
