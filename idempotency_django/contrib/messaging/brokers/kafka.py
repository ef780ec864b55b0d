"""Kafka: a publisher, and the source of ``run_consumer``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured

from ....lazy import extra
from ..events import STRUCTURED, Event
from .base import Batch, Publisher
from .loop import POLL, Incoming

with extra("kafka"):
    from confluent_kafka import Consumer as Client
    from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

logger = logging.getLogger("idempotency_django")

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
"""The errors that a single message causes. All others have other causes: the connection, a missing
topic or permission, or a fenced producer.
"""


def _checked(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of librdkafka, for publisher and source alike."""
    if not config.get("bootstrap.servers"):
        raise ImproperlyConfigured(
            "The config of Kafka has no 'bootstrap.servers'. Set it, for example to "
            "'kafka-1:9092,kafka-2:9092'."
        )
    return config


class KafkaPublisher(Publisher):
    """Publishes to Kafka, each message confirmed by all replicas that are in sync.

    The key of a record is the message's group, so that a group is in one partition. One message of
    a group is under way at a time: the next one is sent when it is confirmed.

    Args:
        outbox_topic: the topic of the outbox.
        config: the configuration of librdkafka, with at least ``bootstrap.servers``. By default,
            Kafka may take ten seconds to confirm a message (``message.timeout.ms``). What the
            promise needs is set in any case: ``enable.idempotence`` and ``acks=all``.
        topic: the topic in Kafka; by default, it has the same name.

    Raises:
        ImproperlyConfigured: the configuration names no server.
    """

    def __init__(
        self,
        outbox_topic: str,
        /,
        *,
        config: Mapping[str, Any],
        topic: str = "",
    ) -> None:
        super().__init__(outbox_topic)
        self._kafka_topic = topic or outbox_topic
        self._config = {
            "linger.ms": 0,  # queued messages are sent together anyway
            "message.timeout.ms": 10_000,
            **_checked(config),
            "enable.idempotence": True,
            "acks": "all",
        }
        self._producer: Producer | None = None

    def publish(self, batch: Batch) -> None:
        self._producer = producer = self._producer or Producer(self._config, logger=logger)
        outages: list[KafkaException] = []

        def note(message: Event, problem: KafkaError | None, _: Message | None = None) -> None:
            if problem is None:
                batch.note(message)
            elif problem.code() in _REFUSED:
                batch.note(message, KafkaException(problem))
            else:
                outages.append(KafkaException(problem))

        while True:
            for message in batch if not outages else ():
                try:
                    producer.produce(
                        self._kafka_topic,
                        key=message.subject.encode() if message.subject else None,
                        value=message.to_json().encode(),
                        headers={"content-type": STRUCTURED.encode()},
                        on_delivery=partial(note, message),  # called by poll()
                    )
                except KafkaException as error:
                    note(message, error.args[0])
            if not len(producer):  # each is confirmed, or fails, within the timeout
                break
            producer.poll(0.1)
        for outage in outages:
            raise outage

    def close(self) -> None:
        self._producer = None  # it has nothing to send: publish() waits for all confirmations


class KafkaSource:
    """A topic, of which the processes of one consumer share the partitions.

    Args:
        topic: the topic.
        config: the configuration of librdkafka, with at least ``bootstrap.servers``.
    """

    def __init__(self, topic: str, config: Mapping[str, Any]) -> None:
        self.place = topic
        # An offset is committed after the commit to the database.
        self._config = {**_checked(config), "enable.auto.commit": False}
        self._client: Any = None  # a Client, while it is open
        self._new: set[tuple[str | None, int | None]] = set()

    def open(self) -> None:
        self._new.clear()
        self._client = Client(self._config, logger=logger)
        self._client.subscribe([self.place], on_assign=self._assigned)

    def receive(self) -> Incoming | None:
        message = self._client.poll(POLL)
        if message is None:
            return None
        if (error := message.error()) is not None:
            if error.fatal():
                raise KafkaException(error)
            logger.warning("Kafka reports a problem: %s", error)
            return None
        partition = message.topic(), message.partition()
        is_first = partition in self._new  # the process before us may have begun it
        self._new.discard(partition)
        return Incoming(
            place="/".join(map(str, (*partition, message.offset()))),
            body=message.value() or b"",
            headers=[*(message.headers() or ())],
            redelivered=is_first,
            acknowledge=partial(self._client.commit, message=message, asynchronous=False),
        )

    def beat(self) -> None:
        """Kafka counts heartbeats of librdkafka's own threads, and calls of ``poll()``."""

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _assigned(self, client: Client, partitions: list[TopicPartition]) -> None:
        self._new = {(each.topic, each.partition) for each in partitions}
