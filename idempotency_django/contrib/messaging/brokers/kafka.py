"""Kafka: its publisher and its transport."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Final

from confluent_kafka import Consumer as Client
from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition
from django.core.exceptions import ImproperlyConfigured

from ....conf import seconds_of
from ..consumers import Consumer
from ..databases import reason
from .base import BrokerUnavailable, GroupedBatch, Outgoing, Publisher, unavailable
from .loop import NO_DEAD_LETTERS, ConsumerOptions, Incoming, Loop, Transport

logger = logging.getLogger("idempotency_django")

PREFIX: Final = "ce_"
"""The prefix of the headers that carry an event's attributes: CloudEvents' binding for Kafka."""

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
    """The configuration of librdkafka, for publisher and transport alike."""
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
        config: the configuration of librdkafka, with at least ``bootstrap.servers``.
        topic: the topic in Kafka; by default, it has the same name.
        timeout: how long Kafka may take to confirm a message.

    Raises:
        ImproperlyConfigured: the configuration names no server.
        ValueError: the configuration turns off what the promise needs.
    """

    def __init__(
        self,
        outbox_topic: str,
        /,
        *,
        config: Mapping[str, Any],
        topic: str = "",
        timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        super().__init__(outbox_topic)
        self._kafka_topic = topic or outbox_topic
        self._config = {
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 0,  # queued messages are sent together anyway
            "message.timeout.ms": int(seconds_of("timeout", timeout) * 1000),
            **_checked(config),
        }
        is_safe = self._config["enable.idempotence"] is True
        if not is_safe or str(self._config["acks"]) not in ("all", "-1"):
            raise ValueError(
                "its config turns off enable.idempotence or acks=all, so Kafka could lose or "
                "reorder confirmed messages. Remove both options"
            )
        self._producer: Producer | None = None

    def publish(self, messages: Sequence[Outgoing]) -> list[Exception | None]:
        producer, self._producer = self._producer or Producer(self._config, logger=logger), None
        batch = GroupedBatch(messages, self.deadline)
        for place in batch.ready:
            self._send(producer, batch, place)
        while len(producer):  # each is confirmed, or fails, within the timeout
            producer.poll(0.1)
        answers = batch.answers
        if not any(isinstance(answer, BrokerUnavailable) for answer in answers):
            self._producer = producer  # else the next call creates a new one
        return answers

    def close(self) -> None:
        self._producer = None  # it has nothing to send: publish() waits for all confirmations

    def _send(self, producer: Producer, batch: GroupedBatch, place: int) -> None:
        """Begin to send a message. Once it is confirmed, the next one of its group follows."""

        def note(problem: KafkaError | None, _: Message | None = None) -> None:
            if problem is None:
                error: Exception | None = None
            else:
                kind = KafkaException(problem)
                error = kind if problem.code() in _REFUSED else unavailable(kind)
            following = batch.answer(place, error)
            if following is not None:
                self._send(producer, batch, following)

        if not batch.is_ready(place):
            return
        message = batch.messages[place]
        try:
            attributes, content_type, body = message.event(self.source).to_binary(PREFIX)
            headers = {**message.headers, **attributes, "content-type": content_type}
            producer.produce(
                self._kafka_topic,
                key=message.group.encode() or None,
                value=body,
                headers={name: text.encode() for name, text in headers.items() if text},
                on_delivery=note,  # called by poll()
            )
        except KafkaException as error:
            note(error.args[0])
        except ValueError as error:
            batch.answer(place, error)


POLL: Final = 1.0  # seconds
_FLUSH: Final = 30.0  # seconds

_Place = tuple[str, int]


def run_consumer(
    consumer: Consumer,
    topics: Sequence[str],
    *,
    config: Mapping[str, Any],
    dead_letter: str | None = None,
    **options: Any,
) -> None:
    """Handle the messages of topics until SIGTERM; several processes of a group share partitions.

    An offset is committed after what its message asked for. A message that fails holds up its
    partition, and no other, until it is handled or set aside.

    Args:
        consumer: the consumer; its name is the ``group.id``, unless the configuration has one.
        topics: the topics.
        config: the configuration of librdkafka, with at least ``bootstrap.servers``.
        dead_letter: the topic for messages that cannot be handled; required where
            ``idempotency_django.contrib.messaging`` is not installed to keep them.
        options: see :class:`~idempotency_django.contrib.messaging.ConsumerOptions`.

    Raises:
        ImproperlyConfigured: an option cannot be used, or there is no place for messages that
            cannot be handled.
        UnknownEventType: there is no handler for an event, with ``unknown="stop"``.
    """
    common = ConsumerOptions(**options)
    usual = {"group.id": consumer.name, "auto.offset.reset": "earliest"}
    transport = Kafka(topics, {**usual, **config}, dead_letter, common.batch)
    Loop(transport, consumer, common).run()


@dataclass(slots=True)
class _Partition:
    """A partition that is assigned to this process.

    Attributes:
        doubtful: how many of the next messages the process before us may have begun.
        following: the offset after the last one that was fetched.
        open: the offsets that were fetched, and not acknowledged.
        resumes: when to fetch again, after a failure.
    """

    doubtful: int
    following: int | None = None
    open: set[int] = field(default_factory=set)
    resumes: float | None = None

    def fetched(self, offset: int) -> bool:
        """Note that a message was fetched; whether it may have been delivered before."""
        self.following = offset + 1
        self.open.add(offset)
        self.doubtful -= 1
        return self.doubtful >= 0

    def postponed(self, offset: int, until: float) -> None:
        """Note that this message, and all after it, are to be fetched again."""
        self.open = {other for other in self.open if other < offset}
        self.following = min(offset, offset if self.following is None else self.following)
        self.resumes = max(until, self.resumes or until)


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
            raise ImproperlyConfigured(f"topics is {topics!r}; it must be a list of topics.")
        self._topics = [*topics]
        # An offset is committed when we say so, after the commit to the database.
        by_us = {"enable.auto.commit": False, "enable.auto.offset.store": False}
        self._config = {**_checked(config), **by_us}
        self._dead_letter = dead_letter
        self._batch = batch
        self._client: Client | None = None
        self._partitions: dict[_Place, _Partition] = {}
        self._early: list[Message] = []
        # librdkafka keeps a partition paused while another member has it, too.
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
            if messages and limit > 1:  # and already received messages, without waiting for more
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
                continue  # it was revoked: its next owner gets a duplicate
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

    def validate_dead_letters(self) -> None:
        if self._dead_letter is None:
            raise ImproperlyConfigured(NO_DEAD_LETTERS.format("topic"))

    def reject(self, message: Incoming, error: Exception) -> None:
        """Send it to the dead-letter topic, and acknowledge it when Kafka has confirmed it."""
        problems: list[Any] = []
        added = {"dead-letter-reason": reason(error).encode()}
        ours = {"bootstrap.servers", "security.protocol"}
        config = {
            name: value
            for name, value in self._config.items()
            if name in ours or name.startswith(("sasl.", "ssl."))
        }
        producer = Producer({**config, "enable.idempotence": True}, logger=logger)
        producer.produce(
            str(self._dead_letter),
            message.body,
            key=message.native.key(),
            headers=[*message.headers, *added.items()],
            on_delivery=lambda problem, _: problems.append(problem),
        )
        producer.flush(_FLUSH)
        if not problems:
            raise KafkaException(KafkaError(KafkaError._MSG_TIMED_OUT))
        if problems[0] is not None:  # a KafkaError cannot be compared with None
            raise KafkaException(problems[0])
        self.acknowledge([message])

    def close(self) -> None:
        client, self._client = self._client, None
        self._partitions.clear()
        self._early.clear()
        self._paused.clear()
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
        partition = self._partitions.setdefault(place, _Partition(self._batch))
        value = message.value()
        return Incoming(
            place="/".join(map(str, (*place, offset))),
            body=b"" if value is None else value,
            headers=[*(message.headers() or ())],
            redelivered=partition.fetched(offset),
            native=message,
        )

    def _resume(self) -> None:
        """Resume the partitions in which no message waits for its next attempt."""
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
            # A later commit includes this one. If none follows, the messages are delivered again.
            logger.warning("Kafka has refused a commit of offsets: %s", error)

    def _assigned(self, client: Client, partitions: list[TopicPartition]) -> None:
        for each in partitions:
            self._partitions[each.topic, each.partition] = _Partition(self._batch)

    def _revoked(self, client: Client, partitions: list[TopicPartition]) -> None:
        # A handler that runs may end: the next owner of the partition gets its result.
        revoked = {(each.topic, each.partition) for each in partitions}
        for place in revoked:
            self._partitions.pop(place, None)
        self._early = [each for each in self._early if _place_of(each)[0] not in revoked]


def _place_of(message: Message) -> tuple[_Place, int]:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    return (str(topic), int(partition or 0)), int(offset or 0)
