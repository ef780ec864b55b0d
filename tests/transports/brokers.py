"""A place at each of the three brokers: what the tests publish to it, and what is left there."""

from __future__ import annotations

import json
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import amqp
import boto3
import confluent_kafka
import kombu
from confluent_kafka import TopicPartition

from idempotency_django.contrib.messaging import Consumer, Event
from idempotency_django.contrib.messaging.brokers import kafka, rabbitmq, sqs
from tests.kafka import bootstrap, make_topic
from tests.servers import Server
from tests.sqs import client_options, make_queue

PATIENCE = 25  # seconds


def await_that(condition: Callable[[], bool]) -> None:
    """Return when it is true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


class Broker(ABC):
    """One broker, with a place of its own there.

    Attributes:
        place: where the messages are.
        quick: options with which nothing takes long.
    """

    transport: ClassVar[str]
    place: str
    quick: Mapping[str, Any]

    @abstractmethod
    def publish(self, *events: Event | bytes) -> None:
        """Publish events in the structured mode, or anything; they are there when this returns."""

    @abstractmethod
    def publish_binary(self, event: Event) -> None:
        """Publish an event in the binary mode."""

    @abstractmethod
    def left(self) -> int:
        """How many messages are not acknowledged; asked once nobody reads from the place."""

    @abstractmethod
    def dead(self) -> list[bytes]:
        """The messages that the broker keeps because they could not be handled."""

    @abstractmethod
    def run(self, consumer: Consumer, **options: Any) -> None:
        """Run the transport."""

    def close(self) -> None:
        """Leave nothing behind."""

    @contextmanager
    def running(self, consumer: Consumer, **options: Any) -> Iterator[Running]:
        """Run the transport in a thread, for as long as the block lasts."""
        running = Running()

        def run() -> None:
            try:
                self.run(consumer, **{**self.quick, "stop": running.stop, **options})
            except BaseException as error:  # noqa: BLE001  # the test looks at it
                running.error = error
            finally:
                running.ended.set()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield running
        finally:
            running.stop.set()
            thread.join(PATIENCE)
        assert not thread.is_alive()

    def drain(self, consumer: Consumer, until: Callable[[], bool], **options: Any) -> None:
        """Run the transport until something is true."""
        with self.running(consumer, **options) as running:
            await_that(lambda: running.ended.is_set() or until())
        if running.error is not None:
            raise running.error


class Running:
    """A transport that runs in a thread."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.ended = threading.Event()
        self.error: BaseException | None = None


class Kafka(Broker):
    """A topic, and a group of its own."""

    transport = "kafka"

    def __init__(self, server: Server, partitions: int = 1) -> None:
        self.place = uuid.uuid4().hex
        self.dead_letter = f"{self.place}-dead"
        make_topic(server, self.place, partitions)
        make_topic(server, self.dead_letter)
        self.partitions = partitions
        self._published = 0
        self.config = {
            "bootstrap.servers": bootstrap(server),
            "group.id": self.place,
            "session.timeout.ms": 3000,
            "heartbeat.interval.ms": 500,
        }
        self.quick = {"pause": timedelta(seconds=0.2)}
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap(server), "log_level": 0}
        )
        self._looker = self._client("looker")

    def publish(self, *events: Event | bytes) -> None:
        for event in events:
            number, self._published = self._published, self._published + 1
            body = event if isinstance(event, bytes) else event.to_json().encode()
            self._producer.produce(self.place, body, partition=number % self.partitions)
        assert self._producer.flush(PATIENCE) == 0

    def publish_binary(self, event: Event) -> None:
        headers, body = event.to_http()
        self._published += 1
        self._producer.produce(
            self.place,
            body,
            headers={name.replace("ce-", "ce_"): value for name, value in headers.items()},
        )
        assert self._producer.flush(PATIENCE) == 0

    def left(self) -> int:
        places = [TopicPartition(self.place, number) for number in range(self.partitions)]
        committed = self._looker.committed(places, timeout=PATIENCE)
        return self._published - sum(max(0, place.offset) for place in committed)

    def dead(self) -> list[bytes]:
        client = self._client("dead")
        client.assign([TopicPartition(self.dead_letter, 0, 0)])
        high = client.get_watermark_offsets(TopicPartition(self.dead_letter, 0), timeout=30)[1]
        messages = client.consume(high, PATIENCE) if high else []
        client.close()
        return [message.value() or b"" for message in messages]

    def run(self, consumer: Consumer, **options: Any) -> None:
        config = {**self.config, **options.pop("config", {})}
        kafka.run_consumer(consumer, [self.place], config=config, **options)

    def close(self) -> None:
        self._looker.close()

    def _client(self, group: str) -> confluent_kafka.Consumer:
        config = {**self.config, "enable.auto.commit": False, "log_level": 0}
        if group != "looker":
            config["group.id"] = f"{self.place}-{group}"
        return confluent_kafka.Consumer(config)


class RabbitMQ(Broker):
    """A quorum queue, which drops what it is told to reject, and a queue of dead letters."""

    transport = "rabbitmq"

    def __init__(self, server: Server, url: str = "") -> None:
        self.place = uuid.uuid4().hex
        self.dead_letter = f"{self.place}-dead"
        self.url = url or server.url
        self.quick = {"pause": timedelta(seconds=0.2), "heartbeat": timedelta(seconds=4)}
        self._connection = kombu.Connection(server.url)
        channel = self._connection.channel()
        self._dead = kombu.Queue(self.dead_letter)(channel)
        self._dead.declare()
        self._queue = kombu.Queue(self.place, queue_arguments={"x-queue-type": "quorum"})(channel)
        self._queue.declare()
        self._producer = kombu.Producer(channel, routing_key=self.place)

    def publish(self, *events: Event | bytes) -> None:
        for event in events:
            body = event if isinstance(event, bytes) else event.to_json().encode()
            self._producer.publish(
                body,
                content_type="application/cloudevents+json",
                content_encoding="binary",
            )
        self._there()

    def publish_binary(self, event: Event, **more: str) -> None:
        headers, body = event.to_http()
        content_type = headers.pop("content-type")
        named = {name.replace("ce-", "cloudEvents:"): value for name, value in headers.items()}
        self._producer.publish(
            body, headers={**named, **more}, content_type=content_type, content_encoding="binary"
        )
        self._there()

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

    def publish_frames(self, properties: bytes, body: bytes) -> None:
        """Publish a message with properties of these bytes, which no client would send."""
        channel: Any = self._producer.channel
        message = amqp.Message(body)
        message._serialize_properties = lambda: properties  # type: ignore[attr-defined]
        channel.basic_publish(message, exchange="", routing_key=self.place)
        self._there()

    def left(self) -> int:
        return len([*iter(lambda: self._queue.get(no_ack=True), None)])

    def dead(self) -> list[bytes]:
        return [bytes(message.body) for message in self.dead_messages()]

    def dead_messages(self) -> list[Any]:
        """The messages in the queue of dead letters, with their headers."""
        return [*iter(lambda: self._dead.get(no_ack=True), None)]

    def run(self, consumer: Consumer, **options: Any) -> None:
        rabbitmq.run_consumer(consumer, self.place, url=self.url, **options)

    def close(self) -> None:
        self._queue.delete()
        self._dead.delete()
        self._connection.release()

    def _there(self) -> None:
        self.ready()  # answered after what was published

    def ready(self, queue: str = "") -> int:
        """How many messages nobody has been given yet."""
        asked = self._dead if queue == self.dead_letter else self._queue
        return int(asked.queue_declare(passive=True).message_count)


class SQS(Broker):
    """A queue, and the queue to which it gives what was received too often."""

    transport = "sqs"

    def __init__(self, server: Server, *, redrive: bool = True, **attributes: str) -> None:
        name = uuid.uuid4().hex
        self.client_options = client_options(server)
        self.client = boto3.client("sqs", **self.client_options)
        self._dead = make_queue(server, f"{name}-dead")
        if redrive:
            target = self._attributes(self._dead)["QueueArn"]
            policy = {"deadLetterTargetArn": target, "maxReceiveCount": "2"}
            attributes["RedrivePolicy"] = json.dumps(policy)
        self.place = make_queue(server, name, **attributes)
        self.quick = {
            "pause": timedelta(seconds=0.2),
            "wait": timedelta(seconds=1),
            "visibility": timedelta(seconds=3),
        }

    def publish(self, *events: Event | bytes) -> None:
        for event in events:
            body = event if isinstance(event, bytes) else event.to_json().encode()
            self.client.send_message(QueueUrl=self.place, MessageBody=body.decode())

    def publish_binary(self, event: Event) -> None:
        headers, body = event.to_http()
        self.client.send_message(
            QueueUrl=self.place,
            MessageBody=body.decode(),
            MessageAttributes={
                name: {"DataType": "String", "StringValue": value}
                for name, value in headers.items()
            },
        )

    def left(self) -> int:
        counts = self._attributes(self.place)
        names = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")
        return sum(int(counts[name]) for name in names)

    def dead(self) -> list[bytes]:
        answer = self.client.receive_message(QueueUrl=self._dead, MaxNumberOfMessages=10)
        return [message["Body"].encode() for message in answer.get("Messages", ())]

    def run(self, consumer: Consumer, **options: Any) -> None:
        sqs.run_consumer(consumer, self.place, client=self.client_options, **options)

    def _attributes(self, url: str) -> dict[str, str]:
        answer = self.client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])
        return dict(answer["Attributes"])
