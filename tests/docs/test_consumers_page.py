"""The consumer that the page on consumers shows, before a real RabbitMQ."""

from __future__ import annotations

import logging
import re
import signal
import sys
import types
from collections.abc import Iterator
from typing import Any

import kombu
import pytest
from shop.models import Charge

from idempotency_django.contrib.messaging import Event
from idempotency_django.errors import OperationInProgress
from idempotency_django.models import IdempotencyKey
from tests.docs.examples import ROOT
from tests.servers import Server

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = ROOT / "docs" / "messages" / "consumers.md"
QUEUES = ["billing", "billing.dead"]


def block(first: str) -> str:
    """The block of the page whose first line is that one."""
    found = re.search(rf"```python\n({re.escape(first)}\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    return found[1]


@pytest.fixture
def program(rabbit: Server, settings, monkeypatch) -> Iterator[dict[str, Any]]:
    """The names of the page's command, and its queues, empty at first."""
    consumers = types.ModuleType("shop.consumers")
    exec(block("# shop/consumers.py"), vars(consumers))
    monkeypatch.setitem(sys.modules, "shop.consumers", consumers)
    settings.BROKER_URL = rabbit.url
    command: dict[str, Any] = {"__name__": "consume_billing"}
    exec(block("# shop/management/commands/consume_billing.py"), command)
    before = signal.getsignal(signal.SIGTERM)
    with kombu.Connection(rabbit.url) as connection:
        command["channel"] = channel = connection.channel()
        for name in QUEUES:
            kombu.Queue(name)(channel).delete()
        yield command
        for name in QUEUES:
            kombu.Queue(name)(channel).delete()
    signal.signal(signal.SIGTERM, before)


def publish(program: dict[str, Any], *bodies: str | bytes) -> None:
    """Send messages, in this order."""
    producer = kombu.Producer(program["channel"], routing_key="billing")
    for body in bodies:
        producer.publish(body, declare=[program["queue"]], content_type="text/plain")


def bodies(program: dict[str, Any], name: str) -> list[Any]:
    """What is in a queue."""
    queue = kombu.Queue(name)(program["channel"])
    return [message.body for message in iter(lambda: queue.get(no_ack=True), None)]


def order(number: str, **changes: Any) -> str:
    """A message that an order was paid."""
    given = {"source": "/shop", "type": "order.paid", "data": {"order": number, "amount": 5}}
    return Event(**{"id": number, **given, **changes}).to_json()


def test_every_end(program: dict[str, Any], monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be handled is kept in the other queue, and the rest is handled once."""
    pauses: list[float] = []
    monkeypatch.setattr(program["Command"], "pause", lambda _, seconds: pauses.append(seconds))
    busy = [None, 12.5]

    @program["billing"].on("order.busy")
    def wait(event: Event, execution: Any) -> None:
        if busy:
            error = OperationInProgress()
            error.remaining = busy.pop()
            raise error

    @program["billing"].on("test.ends")
    def end(event: Event, execution: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    poison = order("2", data={"order": "2", "amount": None})
    unknown, malformed = order("3", type="order.lost"), b'{"id": "4"'
    after = order("6")
    publish(program, order("1"), poison, unknown, malformed, order("1"))
    publish(program, order("5", type="order.busy"), order("end", type="test.ends"), after)
    with caplog.at_level(logging.CRITICAL):
        program["Command"]().handle()
    assert [charge.reference for charge in Charge.objects.all()] == ["1"]
    assert IdempotencyKey.objects.held().count() == 1
    assert pauses == [5, 5, 5, 5, 12.5, 5]
    dead = [
        bytes(body) if isinstance(body, memoryview) else body for body in bodies(program, QUEUES[1])
    ]
    texts = [body.decode() if isinstance(body, bytes) else body for body in dead]
    assert texts == [poison, unknown, malformed.decode()]
    [left] = bodies(program, QUEUES[0])
    assert Event.from_json(left).id == "6"


def test_nothing_to_do(program: dict[str, Any], monkeypatch) -> None:
    """An empty queue is waited at, until SIGTERM."""
    timeouts: list[float] = []
    real = kombu.Connection.drain_events

    def drain(connection: kombu.Connection, timeout: float) -> Any:
        timeouts.append(timeout)
        if len(timeouts) == 3:
            signal.raise_signal(signal.SIGTERM)
        return real(connection, timeout=0.05)

    monkeypatch.setattr(kombu.Connection, "drain_events", drain)
    program["Command"]().handle()
    assert timeouts == [1, 1, 1]


def test_a_pause_ends_with_the_program(program: dict[str, Any], monkeypatch) -> None:
    """SIGTERM cuts a pause short."""
    command = program["Command"]()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        command.stopping = len(slept) == 2

    monkeypatch.setattr(program["time"], "sleep", sleep)
    command.pause(29.5)
    assert slept == [1, 1]
