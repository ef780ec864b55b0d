"""Handlers and outages that take longer than a broker waits."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from idempotency_django.contrib.messaging import Consumer, Event
from idempotency_django.contrib.messaging.brokers import kombu as brokers_kombu
from tests.contrib.messaging.brokers import Kafka, RabbitMQ, await_that
from tests.contrib.messaging.events import paid
from tests.faults.wires import wire_to
from tests.models import Effect
from tests.support.nightly import nightly
from tests.support.servers import Server

pytestmark = pytest.mark.django_db(transaction=True)


def booking(calls: list[str], hold: threading.Event | None = None, longest: float = 30) -> Consumer:
    """A consumer that notes each call of it, and waits at the first event."""
    consumer = Consumer("billing")
    real = consumer.handle

    def handle(event: Event, **arguments: Any) -> Any:
        calls.append(event.id)
        return real(event, **arguments)

    consumer.handle = handle  # type: ignore[method-assign]

    @consumer.on("order.paid")
    def book(event: Event, execution: Any) -> None:
        if hold is not None:
            hold.wait(longest)
        Effect.objects.create(reference=event.id)

    return consumer


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("redis", {"visibility": 1}),
        nightly("kafka", {}),
    ],
)
def test_slower_than_the_broker_waits(place: Any, name: str, short: dict[str, Any]) -> None:
    """The others give it to another process, which finds that it is being handled: one effect."""
    broker, calls = place(name, **short), list[str]()
    if isinstance(broker, Kafka):
        broker.config |= {"session.timeout.ms": 2000, "max.poll.interval.ms": 2000}
    hold = threading.Event()
    consumer = booking(calls, hold, 6.0)
    broker.publish(paid("a"))
    with broker.running(consumer) as first, broker.running(consumer) as second:
        await_that(lambda: bool(Effect.objects.exists()))
        hold.set()  # the next one is quick
        broker.publish(paid("b"))
        await_that(lambda: Effect.objects.count() == 2 and broker.left() == 0)
    assert (first.error, second.error) == (None, None)
    assert sorted(Effect.objects.values_list("reference", flat=True)) == ["a", "b"]


def test_the_connection_breaks(rabbit: Server, caplog: pytest.LogCaptureFixture) -> None:
    """RabbitMQ goes away while a handler runs: its message comes again, as a duplicate."""
    calls: list[str] = []
    hold = threading.Event()
    consumer = booking(calls, hold)
    with wire_to(rabbit.url) as wire, caplog.at_level(logging.WARNING):
        broker = RabbitMQ(rabbit, wire.url)
        broker.publish(paid("a"))
        with broker.running(consumer) as loop:
            await_that(lambda: calls == ["a"])
            wire.cut_all()
            hold.set()
            await_that(lambda: calls == ["a", "a"])
            broker.publish(paid("b"))
            await_that(lambda: Effect.objects.count() == 2)
    assert loop.error is None
    # The duplicate comes again after the event that follows, if the first delivery is not over yet.
    assert sorted(Effect.objects.values_list("reference", flat=True)) == ["a", "b"]
    assert "cannot reach its broker" in caplog.text
    assert broker.left() == 0
    broker.close()


@pytest.mark.parametrize("name", ["rabbitmq", "redis"])
def test_the_connection_falls_silent(
    place: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection over which nothing comes any more, and which nobody closes, is replaced."""
    for limit in ("_HEARTBEAT", "_SILENCE", "_RENEWAL"):
        monkeypatch.setattr(f"{brokers_kombu.__name__}.{limit}", 2)
    broker, calls = place(name), list[str]()
    with wire_to(broker.url) as wire, caplog.at_level(logging.WARNING):
        broker.source = lambda: brokers_kombu.KombuSource(wire.url, broker.place, broker.options)
        broker.publish(paid("a"))
        with broker.running(booking(calls)) as loop:
            await_that(lambda: Effect.objects.count() == 1 and broker.left() == 0)
            wire.fall_silent()
            if name == "redis":  # which would give it to the silent connection, that waits for one
                await_that(lambda: broker._client.info("clients")["blocked_clients"] == 0)
            broker.publish(paid("b"))
            await_that(lambda: Effect.objects.count() == 2, 60)
    assert loop.error is None
    assert name == "redis" or "Too many heartbeats missed" in caplog.text
