"""Consumers of Kafka, on confluent-kafka: the extra ``[kafka]``."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Unpack

from confluent_kafka import Consumer as Client
from confluent_kafka import KafkaException, Message, Producer, TopicPartition
from django.core.exceptions import ImproperlyConfigured

from ..consumers import Consumer
from ..reasons import reason
from .base import NO_DEAD_LETTERS, Transport
from .incoming import Incoming
from .options import Chosen, Options
from .partitions import Partition
from .running import Loop

logger = logging.getLogger("idempotency_django")

POLL: Final = 1.0  # seconds
_FLUSH: Final = 30.0  # seconds

_Place = tuple[str, int]


def run(
    consumer: Consumer,
    topics: Sequence[str],
    *,
    config: Mapping[str, Any],
    dead_letter: str | None = None,
    **options: Unpack[Options],
) -> None:
    """Handle the messages of topics until SIGTERM; several processes of a group share partitions.

    An offset is committed after what its message asked for. A message that fails holds up its
    partition, and no other, until it is handled or set aside.

    Args:
        consumer: the consumer; its name is the ``group.id``, unless the configuration has one.
        topics: the topics.
        config: the configuration of librdkafka, with at least ``bootstrap.servers``.
        dead_letter: the topic for messages that cannot be handled; required where
            ``idempotency_django.messaging`` is not installed to keep them.
        options: see :class:`~idempotency_django.messaging.transports.options.Options`.

    Raises:
        ImproperlyConfigured: an option cannot be used, or there is no place for messages that
            cannot be handled.
        UnknownEventType: there is no handler for an event, with ``unknown="stop"``.
    """
    chosen = Chosen(**options)
    usual = {"group.id": consumer.name, "auto.offset.reset": "earliest"}
    transport = Kafka(topics, {**usual, **config}, dead_letter, chosen.batch)
    Loop(transport, consumer, chosen).run()


class Kafka(Transport):
    """One member of a consumer group.

    Args:
        topics: the topics.
        config: the configuration of librdkafka.
        dead_letter: the topic for messages that cannot be handled.
        batch: how many messages the process before us may have begun in each partition.
    """

    name: ClassVar[str] = "Kafka"
    lost: ClassVar[tuple[type[BaseException], ...]] = (KafkaException,)

    def __init__(
        self, topics: Sequence[str], config: Mapping[str, Any], dead_letter: str | None, batch: int
    ) -> None:
        if isinstance(topics, str) or not topics:
            raise ImproperlyConfigured(f"topics is {topics!r}; make it a list of topics.")
        if not config.get("bootstrap.servers"):
            raise ImproperlyConfigured(
                "The configuration has no 'bootstrap.servers'. Name the servers of Kafka in it, "
                "such as 'kafka-1:9092,kafka-2:9092'."
            )
        self._topics = [*topics]
        # An offset is committed when we say so, after the commit to the database.
        self._config = {**config, "enable.auto.commit": False, "enable.auto.offset.store": False}
        self._dead_letter = dead_letter
        self._batch = batch
        self._client: Client | None = None
        self._partitions: dict[_Place, Partition] = {}
        self._early: list[Message] = []
        # librdkafka keeps a partition paused while somebody else has it, too.
        self._paused: set[_Place] = set()

    def open(self) -> None:
        self._client = Client(self._config, logger=logger)
        self._client.subscribe(
            self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )

    def fetch(self, limit: int) -> list[Incoming]:
        self._resume()
        messages, self._early = self._early[:limit], self._early[limit:]
        if not messages:
            first = self._open.poll(POLL)
            messages = [] if first is None else [first]
            if messages and limit > 1:  # and what has come already, without waiting for more
                messages += self._open.consume(limit - 1, 0)
        return [incoming for message in messages if (incoming := self._incoming(message))]

    def beat(self, messages: Sequence[Incoming]) -> None:
        # Kafka takes a member for dead that does not poll for max.poll.interval.ms.
        self._pause(self._open.assignment())
        message = self._open.poll(0)
        if message is not None:  # of a partition that was assigned just now
            self._early.append(message)

    def acknowledge(self, messages: Sequence[Incoming]) -> None:
        offsets = {}
        for message in messages:
            place, offset = _place_of(message.native)
            partition = self._partitions.get(place)
            if partition is None or partition.following is None:
                continue  # it was revoked: somebody else will be told that it is a duplicate
            partition.open.discard(offset)
            offsets[place] = min(partition.open, default=partition.following)
        if offsets:
            self._commit([TopicPartition(*place, offset) for place, offset in offsets.items()])

    def postpone(self, message: Incoming, seconds: float) -> None:
        place, offset = _place_of(message.native)
        partition = self._partitions.get(place)
        if partition is None:
            return
        partition.postponed(offset, time.monotonic() + seconds)
        self._pause([TopicPartition(*place)])
        self._open.seek(TopicPartition(*place, partition.following or 0))

    def refuse_loss(self) -> None:
        if self._dead_letter is None:
            raise ImproperlyConfigured(NO_DEAD_LETTERS.format("topic"))

    def reject(self, message: Incoming, error: Exception) -> None:
        self._produce(str(self._dead_letter), message, error)
        self.acknowledge([message])

    def release(self, messages: Sequence[Incoming]) -> None:
        """Nothing to do: their offsets are not committed."""

    def close(self) -> None:
        client, self._client = self._client, None
        self._forget()
        if client is not None:
            client.close()

    @property
    def _open(self) -> Client:
        if self._client is None:
            raise RuntimeError("The transport is not open.")
        return self._client

    def _incoming(self, message: Message) -> Incoming | None:
        error = message.error()
        if error is not None:
            if error.fatal():
                raise KafkaException(error)
            logger.warning("Kafka reports a problem: %s", error)
            return None
        place, offset = _place_of(message)
        partition = self._partitions.setdefault(place, Partition(self._batch))
        value = message.value()
        return Incoming(
            place="/".join(map(str, (*place, offset))),
            body=b"" if value is None else value,
            headers=[*(message.headers() or ())],
            redelivered=partition.fetched(offset),
            native=message,
        )

    def _resume(self) -> None:
        """Go on with the partitions in which nothing waits for its next attempt."""
        now = time.monotonic()
        due = []
        for place in self._paused & self._partitions.keys():
            partition = self._partitions[place]
            if partition.resumes is None or partition.resumes <= now:
                partition.resumes = None
                due.append(place)
        if due:
            self._open.resume([TopicPartition(*place) for place in due])
            self._paused.difference_update(due)

    def _pause(self, partitions: list[TopicPartition]) -> None:
        self._open.pause(partitions)
        self._paused.update((each.topic, each.partition) for each in partitions)

    def _commit(self, offsets: list[TopicPartition]) -> None:
        try:
            self._open.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            if error.args[0].fatal():
                raise
            # A later commit says the same. If none follows, the messages come again, as duplicates.
            logger.warning("Kafka has refused a commit of offsets: %s", error)

    def _assigned(self, client: Client, partitions: list[TopicPartition]) -> None:
        for each in partitions:
            self._partitions[each.topic, each.partition] = Partition(self._batch)

    def _revoked(self, client: Client, partitions: list[TopicPartition]) -> None:
        # A handler that runs may end: the next owner of the partition gets its result.
        revoked = {(each.topic, each.partition) for each in partitions}
        for place in revoked:
            self._partitions.pop(place, None)
        self._early = [each for each in self._early if _place_of(each)[0] not in revoked]

    def _forget(self) -> None:
        self._partitions.clear()
        self._early.clear()
        self._paused.clear()

    def _produce(self, topic: str, message: Incoming, error: Exception) -> None:
        """Send it to a topic, and return when Kafka has it."""
        problems: list[Any] = []
        told = {"dead-letter-reason": reason(error).encode()}
        ours = {"bootstrap.servers", "security.protocol"}
        config = {
            name: value
            for name, value in self._config.items()
            if name in ours or name.startswith(("sasl.", "ssl."))
        }
        producer = Producer({**config, "enable.idempotence": True}, logger=logger)
        producer.produce(
            topic,
            message.body,
            key=message.native.key(),
            headers=[*message.headers, *told.items()],
            on_delivery=lambda problem, _: problems.append(problem),
        )
        producer.flush(_FLUSH)
        if problems != [None]:
            raise KafkaException(*problems)


def _place_of(message: Message) -> tuple[_Place, int]:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    return (str(topic), int(partition or 0)), int(offset or 0)
