"""Kafka, with confluent-kafka: the extra ``[kafka]``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from .base import Outgoing, Publisher
from .lines import Lines

logger = logging.getLogger("idempotency_django")

PREFIX: Final = "ce_"
"""What the headers begin with that carry an event's attributes: CloudEvents' binding for Kafka."""

_REFUSED: Final = frozenset(
    {
        KafkaError._INVALID_ARG,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.POLICY_VIOLATION,
        KafkaError.RECORD_LIST_TOO_LARGE,
    }
)
"""The errors that say something of one message. All others are no message's fault: the way to the
broker, a missing topic or right, a producer that Kafka has fenced."""


class KafkaPublisher(Publisher):
    """Publishes to Kafka, each message confirmed by all replicas that are in sync.

    The key of a record is the message's group, so that a group is in one partition. One message of
    a group is under way at a time: the next one is sent when it is confirmed.

    Args:
        topic: the topic of the outbox.
        config: the producer's configuration, such as ``{"bootstrap.servers": "kafka:9092"}``.
        kafka_topic: the topic in Kafka; by default, it has the same name.
        timeout: seconds that Kafka may take to confirm a message.

    Raises:
        ValueError: the configuration turns off what the promise needs.
    """

    def __init__(
        self,
        topic: str,
        *,
        config: Mapping[str, Any],
        kafka_topic: str = "",
        timeout: float = 10.0,
    ) -> None:
        super().__init__(topic)
        self._kafka_topic = kafka_topic or topic
        self._config = {
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 0,  # what waits in the queue is sent together anyway
            "message.timeout.ms": int(timeout * 1000),
            **config,
        }
        if "bootstrap.servers" not in config:
            raise ValueError("its config does not name bootstrap.servers")
        if self._config["enable.idempotence"] is not True or str(self._config["acks"]) not in (
            "all",
            "-1",
        ):
            raise ValueError(
                "its config turns off enable.idempotence or acks=all, so that Kafka may lose or "
                "reorder what it has confirmed. Leave both out"
            )
        self._producer: Producer | None = None

    def publish(self, messages: Sequence[Outgoing]) -> list[Exception | None]:
        if self._producer is None:
            self._producer = Producer(self._config, logger=logger)
        batch = _Batch(self, self._producer, self._kafka_topic, Lines(messages))
        try:
            return batch.answers()
        finally:
            if not batch.is_settled:
                self._producer = None  # with it goes what it has not sent, which is sent again

    def close(self) -> None:
        self._producer = None  # it has nothing to send: publish() waits for all confirmations


class _Batch:
    """One call of publish(): of each group, the first message that is not confirmed is under way.

    Args:
        publisher: whose source the events have, and which knows when it is late.
        producer: sends them.
        kafka_topic: where to.
        lines: what to send.
    """

    def __init__(
        self, publisher: Publisher, producer: Producer, kafka_topic: str, lines: Lines
    ) -> None:
        self._publisher = publisher
        self._producer = producer
        self._kafka_topic = kafka_topic
        self._lines = lines
        self._under_way = 0
        self._away: Exception | None = None  # why Kafka cannot be reached

    @property
    def is_settled(self) -> bool:
        """Whether Kafka has said of each what has become of it."""
        return not self._under_way and self._away is None

    def answers(self) -> list[Exception | None]:
        """Send them, and wait for what Kafka says of each."""
        for place in self._lines.heads:
            if self._away is None:
                self._send(place)
        while self._under_way:  # each is confirmed, or fails, within the timeout
            self._producer.poll(0.1)
        if self._away is not None:
            self._lines.give_up(self._away)
        return self._lines.answers

    def _send(self, place: int) -> None:
        message = self._lines.messages[place]
        if late := self._publisher.late():
            self._lines.fail(place, late)
            return
        try:
            attributes, content_type, body = message.event(self._publisher.source).to_binary(PREFIX)
            headers = {**message.headers, **attributes, "content-type": content_type}
            self._producer.produce(
                self._kafka_topic,
                key=message.group.encode() or None,
                value=body,
                headers={name: text.encode() for name, text in headers.items() if text},
                on_delivery=partial(self._note, place),
            )
        except KafkaException as error:
            self._fail(place, error.args[0])
        except ValueError as error:
            self._lines.fail(place, error)
        else:
            self._under_way += 1

    def _note(self, place: int, error: KafkaError | None, _: Message) -> None:
        """Called by poll() with what has become of a message."""
        self._under_way -= 1
        if error is None:
            following = self._lines.confirm(place)
            if following is not None and self._away is None:
                self._send(following)
        else:
            self._fail(place, error)

    def _fail(self, place: int, error: KafkaError) -> None:
        if error.code() in _REFUSED:
            self._lines.fail(place, KafkaException(error))
        else:
            self._away = KafkaException(error)
