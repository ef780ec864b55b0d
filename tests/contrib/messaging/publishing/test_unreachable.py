"""What a publisher does while its broker refuses, is away or does not respond."""

from __future__ import annotations

import math
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import kombu
import pytest
from django.core.exceptions import ImproperlyConfigured

from idempotency_django.contrib import messaging
from idempotency_django.contrib.messaging import Consumer, KafkaPublisher, KombuPublisher
from idempotency_django.contrib.messaging.brokers.base import Batch, Refused
from idempotency_django.contrib.messaging.outbox.topics import Topic
from tests.contrib.messaging.brokers import Broker
from tests.faults.wires import wire_to
from tests.support.kafka import bootstrap, kafka, make_topic
from tests.support.servers import Server, free_port

from .messages import NotSent, Outage, failures, grouped, outgoing, published


@pytest.fixture
def rabbit_broker(place: Callable[..., Broker]) -> Broker:
    return place("rabbitmq")


def assert_away(results: Sequence[Exception | None], *texts: str) -> None:
    """The broker is away, which is said in one of these words, and no message is blamed for it."""
    for result in results:
        assert isinstance(result, Outage)
        assert any(text in str(result) for text in texts), result


def test_nobody_gets_it(rabbit: Server) -> None:
    """A message that no queue gets has failed; the connection goes on."""
    exchange = f"orders-{uuid.uuid4().hex}"
    with kombu.Connection(rabbit.url) as connection:
        channel = connection.channel()
        kombu.Exchange(exchange, type="topic")(channel).declare()
        publisher = KombuPublisher("orders", url=rabbit.url, exchange=exchange)
        first, second = published(publisher, grouped("a-1", "b-1"))
        assert "No queue is bound to" in str(first)
        assert isinstance(second, Refused)
        queue = kombu.Queue(exclusive=True)(channel)
        queue.declare()
        queue.bind_to(exchange, routing_key="order.#")
        results = published(publisher, [*grouped("a-1"), outgoing("b", type="other")])
        assert failures(results) == [False, True]
        assert queue.get(no_ack=True).properties["message_id"] == "a-1"
        publisher.close()
        kombu.Exchange(exchange)(channel).delete()


def test_refused_by_the_broker(rabbit: Server) -> None:
    """A message that RabbitMQ refuses (basic.nack) has failed, and none after it overtakes it."""
    name = f"full-{uuid.uuid4().hex}"
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    with kombu.Connection(rabbit.url) as connection:
        queue = kombu.Queue(name, queue_arguments=full)(connection.channel())
        queue.declare()
        publisher = KombuPublisher("orders", url=rabbit.url, queue=name)
        results = published(publisher, grouped("a-1", "a-2", "a-3"))
        assert failures(results) == [False, True, True]
        assert "basic.nack" in str(results[1])
        queue.purge()
        assert published(publisher, grouped("a-2")) == [None]
        publisher.close()
        queue.delete()


@pytest.mark.parametrize("url", ["redis://127.0.0.1:{}/0", "sqs://tests:tests@127.0.0.1:{}"])
def test_server_that_does_not_respond(url: str) -> None:
    """A Redis or an SQS that takes a connection and is silent is an outage after the timeout."""
    options = {"transport_options": {"region": "eu-central-1"}} if url.startswith("sqs") else {}
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as silent:
        publisher = KombuPublisher(
            "orders",
            url=url.format(silent.getsockname()[1]),
            timeout=timedelta(seconds=0.5),
            connection=options,
        )
        [result] = pool.submit(published, publisher, grouped("a-1")).result(20)
    assert isinstance(result, Outage)
    assert "timeout" in str(result).lower()


def test_no_queue(rabbit: Server) -> None:
    """A queue that is not there is declared, so that its first message is not refused."""
    name = f"new-{uuid.uuid4().hex}"
    publisher = KombuPublisher("orders", url=rabbit.url, queue=name)
    assert published(publisher, grouped("a-1")) == [None]
    publisher.close()
    with kombu.Connection(rabbit.url) as connection:
        queue = kombu.Queue(name)(connection.channel())
        assert queue.get(no_ack=True).properties["message_id"] == "a-1"
        queue.delete()


def test_no_exchange(rabbit: Server) -> None:
    """An exchange that is not there is no message's fault."""
    name = f"missing-{uuid.uuid4().hex}"
    publisher = KombuPublisher("orders", url=rabbit.url, exchange=name)
    assert_away(published(publisher, grouped("a-1", "b-1")), "NOT_FOUND")
    with kombu.Connection(rabbit.url) as connection:
        channel = connection.channel()
        kombu.Exchange(name, type="topic")(channel).declare()
        queue = kombu.Queue(exclusive=True)(channel)
        queue.declare()
        queue.bind_to(name, routing_key="#")
        assert published(publisher, grouped("a-1", "b-1")) == [None, None]
        publisher.close()
        kombu.Exchange(name)(channel).delete()


@pytest.mark.filterwarnings(  # py-amqp leaves the socket to the garbage collector
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("breaks", ["cut_all", "fall_silent"])
def test_connection_lost(rabbit: Server, rabbit_broker: Broker, breaks: str) -> None:
    """A connection that broke while nobody used it, or over which nothing comes any more, is given
    up in time, and replaced at the next attempt.
    """
    options = {"timeout": timedelta(seconds=1)}
    with (
        wire_to(rabbit.url) as wire,
        rabbit_broker.publisher(url=wire.url, **options) as publisher,
    ):
        assert published(publisher, grouped("a-1")) == [None]
        getattr(wire, breaks)()
        words = ("onnection", "ocket", "roken", "Timeout")
        assert_away(published(publisher, grouped("a-2", "b-1")), *words)
        assert published(publisher, grouped("a-2", "b-1")) == [None, None]
    assert sorted(event.id for event in rabbit_broker.events(3)) == ["a-1", "a-2", "b-1"]


@pytest.mark.nightly
def test_kafka_restarted() -> None:
    """While Kafka is away, no message is blamed for it; when it is back, they are sent."""
    port = free_port()
    with kafka(port) as server:
        make_topic(server, "orders")
        config = {"bootstrap.servers": bootstrap(server)}
        publisher = KafkaPublisher("orders", config={**config, "message.timeout.ms": 3000})
        assert published(publisher, grouped("a-1")) == [None]
    assert_away(published(publisher, grouped("a-2", "b-1")), "timed out")
    with kafka(port) as server:
        make_topic(server, "orders")
        assert published(publisher, grouped("a-2", "b-1")) == [None, None]
    publisher.close()


def test_unsafe_config() -> None:
    """A configuration cannot turn off what the promise needs."""
    config = {"bootstrap.servers": "a:1", "acks": 1, "enable.idempotence": False}
    made = KafkaPublisher("orders", config=config)._config
    assert (made["acks"], made["enable.idempotence"]) == ("all", True)


def test_batch() -> None:
    """Of each group one message at a time may be begun; none that follows one that failed."""
    messages = grouped("a-1", "a-2", "b-1", "b-2", "c-1")
    a1, a2, b1, _, c1 = messages
    batch = Batch(messages, math.inf)
    assert [*batch] == [a1, b1, c1]
    assert [*batch] == []
    batch.note(a1)
    refused = ValueError("b-1")
    batch.note(b1, refused)
    assert [*batch] == [a2]
    batch.note(c1)
    assert [*batch] == []
    batch.refuse_unnoted("not noted")
    unnoted = batch.results.pop("a-2")
    assert isinstance(unnoted, Refused)
    assert unnoted.final
    assert batch.results == {"a-1": None, "b-1": refused, "c-1": None}
    for wrong in (a1, messages[3]):  # noted before; not begun
        with pytest.raises(ValueError, match=f"{wrong.id} cannot be noted"):
            batch.note(wrong)


def test_what_a_publisher_was_not_given_is_not_refused() -> None:
    """One that takes all at once gets the next messages of the groups later."""
    messages = grouped("a-1", "a-2")
    batch = Batch(messages, math.inf)
    for message in list(batch):
        batch.note(message)
    batch.refuse_unnoted("not noted")
    assert batch.results == {"a-1": None}


consumer = Consumer("billing")


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("KombuPublisher", {"url": "amqp://nowhere.invalid//"}),
        (
            "KafkaPublisher",
            {"config": {"bootstrap.servers": "127.0.0.1:1"}},
        ),
        ("HttpPublisher", {"url": "https://nowhere.invalid/", "secrets": ["whsec_c2VjcmV0"]}),
        ("CeleryPublisher", {}),
        ("LocalPublisher", {"consumers": [f"{__name__}.consumer"]}),
    ],
)
def test_no_time_left(backend: str, options: dict[str, Any]) -> None:
    """Once half of the relay's lease is over, a publisher begins no message."""
    topic = Topic(name="orders", backend=f"{messaging.__name__}.{backend}", options=options)
    publisher = topic.publisher()
    results = published(publisher, grouped("a-1", "a-2", "b-1"), deadline=0)
    assert [type(result) for result in results] == [NotSent] * 3


def test_missing_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the client of a broker is not installed, the error says what to install."""
    for client, extra, module in (
        ("confluent_kafka", "kafka", "kafka.KafkaPublisher"),
        ("kombu", "rabbitmq", "kombu.KombuPublisher"),
        ("httpx", "webhooks", "http.HttpPublisher"),
        ("celery", "celery", "celery.CeleryPublisher"),
    ):
        with monkeypatch.context() as without:
            place, _, name = module.rpartition(".")
            for each in (client, f"{client}.app"):
                without.setitem(sys.modules, each, None)
            without.delitem(sys.modules, f"{messaging.__name__}.brokers.{place}", raising=False)
            without.delitem(vars(messaging), name, raising=False)  # imported at its first use
            with pytest.raises(ImproperlyConfigured, match=rf"idempotency-django\[{extra}\]"):
                Topic(name="orders", backend=f"{messaging.__name__}.{name}").publisher()
