"""Real brokers, each with a queue of its own: how to publish to it, and what is in it."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import kombu
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from idempotency_django.contrib.messaging import Event, Publisher
from idempotency_django.contrib.messaging.outbox.topics import Topic
from tests.support.kafka import bootstrap, make_topic
from tests.support.machine import patience
from tests.support.servers import Server
from tests.support.sqs import kombu_url, make_queue

PUBLISHERS = "idempotency_django.contrib.messaging"
PATIENCE = 30  # seconds


@dataclass(frozen=True)
class Broker:
    """A broker, as a test sees it.

    Attributes:
        backend: the publisher's path.
        options: what the publisher is made with.
        receive: the next events that are there, and none if there are no more.
    """

    backend: str
    options: Mapping[str, Any]
    receive: Callable[[], list[Event]]

    @contextmanager
    def publisher(self, **options: Any) -> Iterator[Publisher]:
        """A publisher to it, for the topic "orders"."""
        made = Topic(
            name="orders", backend=self.backend, options={**self.options, **options}
        ).publisher()
        try:
            yield made
        finally:
            made.close()

    def events(self, count: int) -> list[Event]:
        """The events that came, in their order, once there are so many; it takes them away."""
        events: list[Event] = []
        deadline = time.monotonic() + patience(PATIENCE)
        while len(events) < count and time.monotonic() < deadline:
            events += self.receive()
        return events + self.receive()


@contextmanager
def kombu_broker(server: Server, suffix: str = "") -> Iterator[Broker]:
    """RabbitMQ, Valkey or SQS, by kombu; there, a suffix of ".fifo" makes a FIFO queue."""
    name, options, url = f"orders-{uuid.uuid4().hex}{suffix}", dict[str, Any](), server.url
    if server.url.startswith("sqs"):
        options, url = {"region": "eu-central-1", "wait_time_seconds": 1}, kombu_url(server)
        make_queue(server, name)
    with kombu.Connection(url, transport_options=options) as connection:
        arguments = {"x-queue-type": "quorum"} if url.startswith("amqp") else {}
        channel = connection.channel()
        queue = kombu.Queue(name, queue_arguments=arguments)(channel)
        queue.declare()

        def receive() -> list[Event]:
            message = queue.get()
            if message is None:
                return []
            message.ack()
            assert message.properties["delivery_mode"] == 2
            assert message.content_type == "application/cloudevents+json"
            event = Event.from_json(message.body)
            assert message.properties["message_id"] == event.id
            return [event]

        given = {"url": url, "queue": name, "connection": {"transport_options": options}}
        yield Broker(f"{PUBLISHERS}.KombuPublisher", given, receive)
        queue.delete()


@contextmanager
def kafka_broker(server: Server) -> Iterator[Broker]:
    """Kafka, with two partitions."""
    name = f"orders-{uuid.uuid4().hex}"
    make_topic(server, name, partitions=2)
    consumer = Consumer({"bootstrap.servers": bootstrap(server), "group.id": name})
    consumer.assign([TopicPartition(name, number, OFFSET_BEGINNING) for number in range(2)])

    def receive() -> list[Event]:
        events = []
        while (message := consumer.poll(0.3)) is not None:
            assert message.error() is None, message.error()
            headers = {key: value.decode() for key, value in message.headers()}
            assert headers["content-type"] == "application/cloudevents+json"
            event = Event.from_json(message.value())
            assert (message.key() or b"").decode() == (event.subject or "")
            events.append(event)
        return events

    config = {"bootstrap.servers": bootstrap(server)}
    yield Broker(f"{PUBLISHERS}.KafkaPublisher", {"config": config, "topic": name}, receive)
    consumer.close()


def plain(event: Event) -> tuple[Any, ...]:
    """What a consumer can tell of an event."""
    data = event.data if not isinstance(event.data, bytes) else base64.b64encode(event.data)
    causedby = event.extensions.get("causedby")
    return (event.id, event.source, event.type, event.subject, event.time, data, causedby)
