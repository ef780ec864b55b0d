"""What each transport does with its broker: every message has one effect, or is kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from idempotency_django.errors import StoreUnavailable
from idempotency_django.messaging import parking
from idempotency_django.messaging.consumers import Consumer
from idempotency_django.messaging.events import Event
from idempotency_django.messaging.models import InboxMessage
from tests.models import Effect

from .brokers import Broker

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

MALFORMED = b'{"specversion": "1.0", "id": '


def paid(number: str, **changes: Any) -> Event:
    """An event, as its sender makes it."""
    return Event(**{"id": number, "source": "/shop", "type": "order.paid", "data": {}, **changes})


def effects() -> Counter[str]:
    """How many effects there are of each event."""
    return Counter(Effect.objects.values_list("reference", flat=True))


def parked() -> dict[str, tuple[str, bytes]]:
    """What is parked, by its type: the error and the body."""
    rows = InboxMessage.objects.filter(source="consumer:billing", state="parked")
    return {row.type: (row.error, bytes(row.body)) for row in rows}


class Billing:
    """A consumer that makes an effect of each event, and fails as the event says."""

    def __init__(self, **options: Any) -> None:
        self.starts: Counter[str] = Counter()
        self.redelivered: list[tuple[str, bool]] = []
        self.consumer = Consumer("billing", **{"max_attempts": 2, **options})
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
    """One effect for each event, and what cannot be handled is parked, so the broker may forget."""
    billing = Billing()
    broker.publish(paid("a"), paid("b", data={"fails": 1}), paid("a"), MALFORMED)
    broker.publish(paid("p", type="order.poison"), paid("u", type="order.lost"))
    broker.publish_binary(paid("binary", subject='100 % "Käse"', data={"order": "ü"}))
    broker.drain(billing.consumer, lambda: len(effects()) == 3 and len(parked()) == 3)
    assert effects() == {"a": 1, "b": 1, "binary": 1}
    assert billing.starts == {"a": 1, "b": 2, "p": 2, "binary": 1}
    assert broker.left() == 0
    kept = parked()
    assert kept[""][1] == MALFORMED
    assert kept["order.poison"][0].endswith("ValueError: poison")
    assert Event.from_json(kept["order.lost"][1]) == paid("u", type="order.lost")


def test_wrong_compression(place: Any) -> None:
    """RabbitMQ's message that is not compressed as it says is set aside, also if it looks right."""
    billing, broker = Billing(), place("rabbitmq")
    for compression in ("gzip", "nonsense"):
        broker.publish_binary(paid(compression), compression=compression)
    broker.publish(paid("a"))
    kept = InboxMessage.objects.order_by("pk").values_list("error", flat=True)
    broker.drain(billing.consumer, lambda: len(effects()) + len(kept.all()) == 3)
    assert effects() == {"a": 1}
    assert "compression='gzip'" in kept[0]
    assert "compression='nonsense'" in kept[1]
    assert broker.left() == 0


def test_told_apart(place: Any) -> None:
    """RabbitMQ's messages that differ in their headers only are set aside each, whatever their id
    at the broker is, and each of them once.
    """
    billing, broker = Billing(), place("rabbitmq")
    for number in ("a", "b", "a"):
        broker.publish_binary(paid(number, type="order.lost"), **{"cloudEvents:time": "noon"})

    def drained() -> bool:
        return InboxMessage.objects.count() == 2 and broker.ready() == 0

    broker.drain(billing.consumer, drained)
    assert broker.left() == 0
    assert InboxMessage.objects.count() == 2


def test_batches(broker: Broker) -> None:
    """Many in one transaction; neighbours of one that fails commit, and it is tried again."""
    billing = Billing()
    batches: list[int] = []
    real = billing.consumer.handle_many

    def handle_many(events: list[Event], **arguments: Any) -> Any:
        batches.append(len(events))
        return real(events, **arguments)

    billing.consumer.handle_many = handle_many  # type: ignore[method-assign]
    numbers = [str(number) for number in range(20)]
    fails = {"7": 1}
    events = [paid(number, data={"fails": fails.get(number, 0)}) for number in numbers]
    broker.publish(*events)
    broker.drain(billing.consumer, lambda: len(effects()) == 20, batch=10)
    assert effects() == dict.fromkeys(numbers, 1)
    assert max(batches) > 1
    assert broker.left() == 0


@pytest.mark.parametrize("transport", ["kafka", "rabbitmq", "sqs"])
def test_without_the_app(place: Any, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no table to park messages in, the broker keeps them in its dead letters."""
    monkeypatch.setattr(parking, "can_park", lambda: False)
    billing, broker = Billing(), place(transport)
    lost = paid("u", type="order.lost")
    broker.publish(MALFORMED, lost, paid("a"))
    dead: list[bytes] = []

    def over() -> bool:
        if transport == "kafka":
            dead.clear()  # a topic keeps what was read
        dead.extend(broker.dead())
        return len(dead) == 2 and len(effects()) == 1

    options = {"dead_letter": broker.dead_letter} if transport == "kafka" else {}
    broker.drain(billing.consumer, over, **options)
    assert sorted(dead) == sorted([MALFORMED, lost.to_json().encode()])
    assert broker.left() == 0
    assert not InboxMessage.objects.exists()


def test_unavailable(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the database is down, a message stays where it is, and its broker counts nothing."""
    billing = Billing(max_attempts=1)
    real, calls = billing.consumer.handle, []

    def handle(event: Event, **arguments: Any) -> Any:
        calls.append(arguments["redelivered"])
        if len(calls) < 8:  # more often than any queue of these tests delivers a message
            raise StoreUnavailable
        return real(event, **arguments)

    monkeypatch.setattr(billing.consumer, "handle", handle)
    broker.publish(paid("a"))
    broker.drain(billing.consumer, lambda: bool(effects()), pause=0.05, longest_pause=0.05)
    assert effects() == {"a": 1}
    assert len(set(calls)) == 1
    assert (broker.left(), broker.dead(), parked()) == (0, [], {})


def test_kafka_has_no_place(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any place for what cannot be handled, Kafka's loop stops at it, and says so."""
    monkeypatch.setattr(parking, "can_park", lambda: False)
    billing, broker = Billing(), place("kafka")
    broker.publish(paid("a"), MALFORMED, paid("b"))
    with pytest.raises(ImproperlyConfigured, match="dead_letter="):
        broker.drain(billing.consumer, lambda: False)
    assert effects() == {"a": 1}
    assert broker.left() == 2
