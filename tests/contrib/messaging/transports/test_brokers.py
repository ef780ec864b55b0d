"""``run_consumer`` at each broker: every message has one effect, or is a dead letter."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from typing import Any

import pytest

from idempotency_django.contrib.messaging import Consumer, Event
from idempotency_django.contrib.messaging.models import InboxMessage
from tests.contrib.messaging.brokers import Broker
from tests.contrib.messaging.events import paid
from tests.models import Effect
from tests.support.nightly import few
from tests.support.shared import effect_counts

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

MALFORMED = b"\xff\xfe{"  # not UTF-8


def dead() -> dict[str, tuple[str, bytes]]:
    """What is dead-lettered, by its type: the error and the body."""
    rows = InboxMessage.objects.filter(source="consumer:billing", state="dead")
    return {row.type: (row.error, bytes(row.body)) for row in rows}


class Billing:
    """A consumer that makes an effect of each event, and fails as the event says."""

    def __init__(self) -> None:
        self.starts: Counter[str] = Counter()
        self.consumer = Consumer("billing", max_attempts=2)
        self.consumer.on("order.paid", "order.poison")(self.book)

    def book(self, event: Event, execution: Any) -> str:
        self.starts[event.id] += 1
        Effect.objects.create(reference=event.id)
        if event.type == "order.poison":
            raise ValueError("poison")
        if event.data.get("fails", 0) >= self.starts[event.id]:
            raise ValueError("not yet")
        return event.id


def test_every_end(broker: Broker) -> None:
    """One effect for each event, and what cannot be handled is kept, so the broker may forget."""
    billing = Billing()
    broker.publish(paid("a"), paid("b", data={"fails": 1}), paid("a"), MALFORMED)
    broker.publish(paid("p", type="order.poison"), paid("u", type="order.lost"))
    broker.publish(paid("ü", subject='100 % "Käse"', data={"order": "ü"}))
    broker.drain(billing.consumer, lambda: len(effect_counts()) == 3 and len(dead()) == 3)
    assert effect_counts() == {"a": 1, "b": 1, "ü": 1}
    assert billing.starts == {"a": 1, "b": 2, "p": 2, "ü": 1}
    assert broker.left() == 0
    kept = dead()
    assert kept[""][1] == MALFORMED
    assert kept["order.poison"][0].endswith("ValueError: poison")
    assert Event.from_json(kept["order.lost"][1]) == paid("u", type="order.lost")


@pytest.mark.parametrize("name", ["rabbitmq", "redis"])
def test_compressed(place: Any, name: str) -> None:
    """What is compressed is set aside as it came, and not inflated: a small message may be a large
    one.
    """
    billing, broker = Billing(), place(name)
    bomb = zlib.compress(bytes(2**24))
    bodies = {"gzip": bomb, "zlib": zlib.compress(paid("z").to_json().encode()), "none": b"{}"}
    for compression, body in bodies.items():
        broker.publish_raw(body, {"compression": compression}, "application/cloudevents+json")
    broker.publish(paid("a"))
    kept = InboxMessage.objects.order_by("pk")
    broker.drain(billing.consumer, lambda: len(effect_counts()) + kept.count() == 4)
    assert effect_counts() == {"a": 1}
    assert sorted(bytes(row.body) for row in kept) == sorted(bodies.values())
    assert ["compression", "gzip"] in [pair for row in kept for pair in json.loads(row.headers)]
    assert broker.left() == 0


def test_what_kombu_cannot_read(place: Any) -> None:
    """What somebody else wrote into Redis is not kombu's, and does not end the loop."""
    billing, broker = Billing(), place("redis")
    broker._client.lpush(broker.place, b"garbage", b'{"body": ""}', b"[]", b"\xff")
    broker.publish(paid("a"))
    broker.drain(billing.consumer, lambda: bool(effect_counts()))
    assert effect_counts() == {"a": 1}


def test_told_apart(place: Any) -> None:
    """RabbitMQ's messages that differ in their headers only are set aside each, whatever their id
    at the broker is, and each of them once.
    """
    billing, broker = Billing(), place("rabbitmq")
    for number in ("a", "b", "a"):
        broker.publish_raw(b"{}", {"number": number}, "application/json")

    def drained() -> bool:
        return InboxMessage.objects.count() == 2 and broker.waiting() == 0

    broker.drain(billing.consumer, drained)
    assert broker.left() == 0
    assert InboxMessage.objects.count() == 2


def nested_header(levels: int) -> bytes:
    """The properties of an AMQP message with a header: an array in an array, that many levels."""
    value = b"A" + bytes(4)
    for _ in range(levels):
        value = b"A" + len(value).to_bytes(4, "big") + value
    headers = b"\x01a" + value
    return b"\x20\x00" + len(headers).to_bytes(4, "big") + headers


@pytest.mark.parametrize("levels", few([900, 10, 300, 700, 950]))
def test_nested_headers(place: Any, levels: int) -> None:
    """However deep a header is nested, its message is handled or set aside."""
    billing, broker = Billing(), place("rabbitmq")
    broker.publish_frames(nested_header(levels), paid("a").to_json().encode())
    broker.publish(paid("b"))
    until = lambda: len(effect_counts()) + len(dead()) == 2  # noqa: E731
    broker.drain(billing.consumer, until)
    assert effect_counts()["b"] == 1
    assert broker.left() == 0
