"""A place at each of the brokers: what is published to it, and what is left there."""

from __future__ import annotations

import json
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

import amqp
import boto3
import confluent_kafka
import kombu
import redis
from confluent_kafka import OFFSET_BEGINNING, TopicPartition
from django.db import connections

from idempotency_django.contrib.messaging import Consumer, Event, Publisher
from idempotency_django.contrib.messaging.brokers.kafka import KafkaSource
from idempotency_django.contrib.messaging.brokers.kombu import KombuSource
from idempotency_django.contrib.messaging.brokers.loop import ConsumerLoop, Source
from idempotency_django.contrib.messaging.outbox.topics import Topic
from tests.support.kafka import bootstrap, make_topic
from tests.support.machine import patience
from tests.support.servers import Server
from tests.support.sqs import client_options, kombu_url, make_queue

PATIENCE = 120  # seconds
STRUCTURED = "application/cloudevents+json"


def await_that(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Return when it is true."""
    deadline = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


class Broker(ABC):
    """One broker, with a place of its own there.

    Attributes:
        place: where the messages are.
        url: what ``run_consumer`` gets.
        options: its further options.
        backend: the publisher of a topic that goes there.
    """

    place: str
    url: str
    options: Mapping[str, Any]
    backend: ClassVar[str]

    @abstractmethod
    def publish(self, *events: Event | bytes) -> None:
        """Publish events in the structured mode, or anything; they are there when this returns."""

    @abstractmethod
    def left(self) -> int:
        """How many messages are not acknowledged; asked once nobody reads from the place."""

    @abstractmethod
    def receive(self) -> list[Event]:
        """The next events that a publisher has sent, and none if there are no more."""

    @abstractmethod
    def publishing(self) -> dict[str, Any]:
        """What the publisher is made with."""

    def waiting(self) -> int:
        """How many messages the broker has not given away for good, while others read from it."""
        return self.left()

    def source(self) -> Source:
        """What the loop reads from."""
        return KombuSource(self.url, self.place, self.options)

    def close(self) -> None:
        """Leave nothing behind."""

    # What publishes to it.

    @contextmanager
    def publisher(self, **options: Any) -> Iterator[Publisher]:
        """A publisher to it, for the topic "orders"."""
        given = {**self.publishing(), **options}
        made = Topic(name="orders", backend=self.backend, options=given).publisher()
        try:
            yield made
        finally:
            made.close()

    def events(self, count: int) -> list[Event]:
        """The events that came, in their order, once there are so many; it takes them away."""
        events: list[Event] = []
        deadline = time.monotonic() + patience(30)
        while len(events) < count and time.monotonic() < deadline:
            events += self.receive()
        return events + self.receive()

    # What consumes from it.

    @contextmanager
    def running(self, consumer: Consumer, **options: Any) -> Iterator[Running]:
        """Run the loop in a thread, for as long as the block lasts."""
        running = Running()

        def run() -> None:
            try:
                ConsumerLoop(consumer, self.source(), running.stop, **options).run()
            except BaseException as error:  # noqa: BLE001  # the test looks at it
                running.error = error
            finally:
                connections.close_all()
                running.ended.set()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield running
        finally:
            running.stop.set()
            thread.join(patience(PATIENCE))
        assert not thread.is_alive()

    def drain(self, consumer: Consumer, until: Callable[[], bool], **options: Any) -> None:
        """Run the loop until something is true."""
        with self.running(consumer, **options) as running:
            await_that(lambda: running.ended.is_set() or until())
        if running.error is not None:
            raise running.error


class Running:
    """A loop that runs in a thread."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.ended = threading.Event()
        self.error: BaseException | None = None


class Kafka(Broker):
    """A topic, and a group of its own."""

    backend = "kafka"

    def __init__(self, server: Server, partitions: int = 1) -> None:
        self.place = uuid.uuid4().hex
        self.url = server.url
        make_topic(server, self.place, partitions)
        self.partitions = partitions
        self._published = 0
        self.options = {
            "group.id": self.place,
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 3000,
            "heartbeat.interval.ms": 500,
        }
        self._server = {"bootstrap.servers": bootstrap(server)}
        self.config = {**self._server, **self.options}
        quiet = {"enable.auto.commit": False, "log_level": 0}
        self._producer = confluent_kafka.Producer({**self._server, "log_level": 0})
        self._looker = confluent_kafka.Consumer({**self.config, **quiet})

    def publish(self, *events: Event | bytes) -> None:
        for event in events:
            number, self._published = self._published, self._published + 1
            body = event if isinstance(event, bytes) else event.to_json().encode()
            self._producer.produce(self.place, body, partition=number % self.partitions)
        assert self._producer.flush(patience(PATIENCE)) == 0

    def left(self) -> int:
        places = [TopicPartition(self.place, number) for number in range(self.partitions)]
        committed = self._looker.committed(places, timeout=patience(PATIENCE))
        return self._published - sum(max(0, place.offset) for place in committed)

    @cached_property
    def _reader(self) -> confluent_kafka.Consumer:
        """Reads from the beginning, and commits nothing."""
        reader = confluent_kafka.Consumer({**self._server, "group.id": f"{self.place}-reader"})
        numbers = range(self.partitions)
        reader.assign([TopicPartition(self.place, number, OFFSET_BEGINNING) for number in numbers])
        return reader

    def receive(self) -> list[Event]:
        events = []
        while (message := self._reader.poll(0.3)) is not None:
            assert message.error() is None, message.error()
            headers = {key: value.decode() for key, value in message.headers()}
            assert headers["content-type"] == STRUCTURED
            event = Event.from_json(message.value())
            assert (message.key() or b"").decode() == (event.subject or "")
            events.append(event)
        return events

    def publishing(self) -> dict[str, Any]:
        return {"config": self._server, "topic": self.place}

    def source(self) -> Source:
        return KafkaSource(self.place, self.config)

    def close(self) -> None:
        self._looker.close()
        if "_reader" in vars(self):
            self._reader.close()


class Kombu(Broker):
    """A queue, and how kombu publishes to it."""

    backend = "kombu"

    def __init__(self, url: str, place: str, options: Mapping[str, Any], own: str = "") -> None:
        self.place = place
        self.url = url
        self.options = options
        self._connection = kombu.Connection(own or url, transport_options=dict(options))
        channel = self._connection.channel()
        self._queue = kombu.Queue(place, queue_arguments={"x-queue-type": "quorum"})(channel)
        self._queue.declare()
        self._producer = kombu.Producer(channel, routing_key=place)

    def publish(self, *events: Event | bytes) -> None:
        for event in events:
            body = event if isinstance(event, bytes) else event.to_json().encode()
            self.publish_raw(body, {}, STRUCTURED)

    def publish_raw(
        self, body: bytes, headers: Mapping[str, Any], content_type: str, **properties: Any
    ) -> None:
        """Publish a message with these headers and properties."""
        self._producer.publish(
            body,
            headers={**headers},
            content_type=content_type,
            content_encoding="binary",
            **properties,
        )
        self._there()

    def left(self) -> int:
        return len([*iter(lambda: self._queue.get(no_ack=True), None)])

    def receive(self) -> list[Event]:
        message = self._queue.get()
        if message is None:
            return []
        message.ack()
        assert message.properties["delivery_mode"] == 2
        assert message.content_type == STRUCTURED
        event = Event.from_json(message.body)
        assert message.properties["message_id"] == event.id
        return [event]

    def publishing(self) -> dict[str, Any]:
        connection = {"transport_options": self.options}
        return {"url": self.url, "queue": self.place, "connection": connection}

    def close(self) -> None:
        self._queue.delete()
        self._connection.release()

    def _there(self) -> None:
        """Return when what was published is there."""


class RabbitMQ(Kombu):
    """A quorum queue."""

    def __init__(self, server: Server, url: str = "") -> None:
        super().__init__(url or server.url, uuid.uuid4().hex, {}, own=server.url)

    def publish_frames(self, properties: bytes, body: bytes) -> None:
        """Publish a message with properties of these bytes, which no client would send."""
        channel: Any = self._producer.channel
        message = amqp.Message(body)
        message._serialize_properties = lambda: properties  # type: ignore[attr-defined]
        channel.basic_publish(message, exchange="", routing_key=self.place)
        self._there()

    def _there(self) -> None:
        self.waiting()  # to which it responds after what was published

    def waiting(self) -> int:
        """How many messages nobody has been given yet."""
        return int(self._queue.queue_declare(passive=True).message_count)


class Redis(Kombu):
    """A list in Valkey."""

    def __init__(self, server: Server, visibility: float = 3) -> None:
        super().__init__(server.url, uuid.uuid4().hex, {"visibility_timeout": visibility})
        self._client = redis.Redis.from_url(server.url)

    def left(self) -> int:
        return super().left() + self._held()

    def waiting(self) -> int:
        return int(self._client.llen(self.place)) + self._held()

    def _held(self) -> int:
        """Those that a process has in hand, or had when it was killed."""
        held = [json.loads(value) for value in self._client.hvals("unacked")]
        return [routing_key for _, _, routing_key in held].count(self.place)

    def close(self) -> None:
        super().close()
        self._client.close()


class SQS(Kombu):
    """A queue in SQS; a suffix of ".fifo" makes a FIFO queue."""

    def __init__(self, server: Server, suffix: str = "", visibility: int = 3) -> None:
        self.client = boto3.client("sqs", **client_options(server))
        place = f"{uuid.uuid4().hex}{suffix}"
        self._address = make_queue(server, place, VisibilityTimeout=str(visibility))
        options = {"region": "eu-central-1", "wait_time_seconds": 1, "polling_interval": 0.1}
        super().__init__(kombu_url(server), place, options)

    def left(self) -> int:
        counts = self.client.get_queue_attributes(QueueUrl=self._address, AttributeNames=["All"])[
            "Attributes"
        ]
        names = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")
        return sum(int(counts[name]) for name in names)
