"""Real brokers, each with a queue of its own: how to publish to it, and what is in it."""

from __future__ import annotations

import base64
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import boto3
import kombu
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from idempotency_django.contrib.messaging import Event, Publisher
from idempotency_django.contrib.messaging.outbox.topics import Topic
from tests.kafka import bootstrap, make_topic
from tests.servers import Server
from tests.sqs import client_options, make_queue

PUBLISHERS = "idempotency_django.contrib.messaging.brokers"
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
        deadline = time.monotonic() + PATIENCE
        while len(events) < count and time.monotonic() < deadline:
            events += self.receive()
        return events + self.receive()


@contextmanager
def kombu_broker(server: Server) -> Iterator[Broker]:
    """RabbitMQ or Valkey, by kombu."""
    name = f"orders-{uuid.uuid4().hex}"
    with kombu.Connection(server.url) as connection:
        arguments = {"x-queue-type": "quorum"} if server.url.startswith("amqp") else {}
        channel = connection.channel()
        queue = kombu.Queue(name, queue_arguments=arguments)(channel)
        queue.declare()

        def receive() -> list[Event]:
            message = queue.get(no_ack=True)
            if message is None:
                return []
            assert message.properties["delivery_mode"] == 2
            event = binary(message.headers, "cloudEvents_", message.content_type, message.body)
            assert message.properties["message_id"] == event.id
            return [event]

        yield Broker(
            f"{PUBLISHERS}.rabbitmq.KombuPublisher", {"url": server.url, "queue": name}, receive
        )
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
            event = binary(headers, "ce_", headers.get("content-type", ""), message.value())
            assert (message.key() or b"").decode() == (event.subject or "")
            events.append(event)
        return events

    config = {"bootstrap.servers": bootstrap(server)}
    yield Broker(f"{PUBLISHERS}.kafka.KafkaPublisher", {"config": config, "topic": name}, receive)
    consumer.close()


@contextmanager
def sqs_broker(server: Server, suffix: str = "") -> Iterator[Broker]:
    """SQS; a suffix of ".fifo" makes it a FIFO queue."""
    url = make_queue(server, f"orders-{uuid.uuid4().hex}{suffix}")
    client = boto3.client("sqs", **client_options(server))

    def receive() -> list[Event]:
        answer = client.receive_message(
            QueueUrl=url, MaxNumberOfMessages=10, MessageSystemAttributeNames=["All"]
        )
        messages = answer.get("Messages", ())
        for message in messages:
            client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
            for name in ("MessageGroupId", "MessageDeduplicationId"):  # moto takes any
                assert re.fullmatch(r"[!-~]{1,128}", message["Attributes"].get(name, "none"))
        return [Event.from_json(message["Body"]) for message in messages]

    options = {"url": url, "client": client_options(server)}
    yield Broker(f"{PUBLISHERS}.sqs.SqsPublisher", options, receive)
    client.close()


def binary(headers: Mapping[str, str], prefix: str, content_type: str, body: Any) -> Event:
    """The event of a message in the binary mode."""
    attributes = {
        f"ce-{name.removeprefix(prefix)}": quote(text)
        for name, text in headers.items()
        if name.startswith(prefix)
    }
    data = body.encode() if isinstance(body, str) else bytes(body)
    return Event.from_http({**attributes, "content-type": content_type}, data)


def plain(event: Event) -> tuple[Any, ...]:
    """What a consumer can tell of an event."""
    data = event.data if not isinstance(event.data, bytes) else base64.b64encode(event.data)
    causedby = event.extensions.get("causedby")
    return (event.id, event.source, event.type, event.subject, event.time, data, causedby)
