"""The publisher without a broker, and what else a message can be."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction
from django.test import override_settings

from idempotency_django.contrib.messaging import Consumer, Relay
from idempotency_django.contrib.messaging.loops import Part, run
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.contrib.messaging.outbox import publish
from idempotency_django.contrib.messaging.outbox import relay as relay_module
from idempotency_django.errors import OperationInProgress, StoreUnavailable
from idempotency_django.models import IdempotencyKey
from idempotency_django.testing import eventually, in_threads
from tests.contrib.messaging.settling import settle

from .conftest import Broker
from .test_relay import got, make_due, publish_each, states

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

first, second = Consumer("first"), Consumer("second")
handled: list[str] = []
fails: set[str] = set()
exits: list[str] = []


@first.on("n")
def handle_first(event: Any, execution: Any) -> None:
    """What the first consumer does, unless it exits."""
    if str(event.data) in exits:
        sys.exit(3)
    handled.append(f"first {event.data}")


@second.on("n")
def handle_second(event: Any, execution: Any) -> None:
    """What the second consumer does, unless it fails."""
    if str(event.data) in fails:
        raise ValueError(event.data)
    handled.append(f"second {event.data} {event.source} {event.subject}")


@pytest.fixture
def local(using: str) -> Iterator[str]:
    """Both consumers get the topic."""
    handled.clear()
    fails.clear()
    exits.clear()
    orders = {
        "BACKEND": "idempotency_django.contrib.messaging.LocalPublisher",
        "OPTIONS": {"consumers": [f"{__name__}.first", f"{__name__}.second"]},
    }
    store = {
        "BACKEND": "idempotency_django.stores.database.DatabaseStore",
        "OPTIONS": {"using": using},
    }
    idempotency = {
        "OUTBOX": {"orders": orders},
        "MESSAGING_DATABASE": using,
        "STORES": {"default": store},
    }
    with override_settings(IDEMPOTENCY=idempotency):
        yield using


def test_each_consumer_once(local: str) -> None:
    """All consumers handle a message; where one fails, the others recognise it the next time."""
    publish_each([1], local, group="g")
    fails.add("1")
    Relay().drain()
    assert handled == ["first 1"]
    assert states(local) == {1: "pending"}
    fails.clear()
    make_due(local)
    Relay().drain()
    assert handled == ["first 1", "second 1 /orders g"]
    assert states(local) == {1: "done"}


def test_nobody_handles_it(local: str) -> None:
    """A type that no consumer handles is refused, and is not lost."""
    with transaction.atomic(using=local):
        publish("orders", 1, type="unknown")
    Relay().drain()
    message = OutboxMessage.objects.using(local).get()
    assert (message.state, message.attempts) == ("pending", 1)
    assert "Register a handler" in message.error


@pytest.mark.parametrize(
    "error", [OperationInProgress("Somebody else has it."), StoreUnavailable("Away.")]
)
def test_not_the_messages_fault(
    local: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That somebody else is handling it, or that the store is away, is no attempt at it."""
    publish_each([1], local)

    def handle(event: Any, **_: Any) -> None:
        raise error

    monkeypatch.setattr(first, "handle", handle)
    Relay().drain()
    monkeypatch.undo()
    message = OutboxMessage.objects.using(local).get()
    assert (message.state, message.attempts) == ("pending", 0)
    assert str(error) in message.error
    make_due(local)
    Relay().drain()
    assert states(local) == {1: "done"}


def test_exit(local: str) -> None:
    """A handler that calls sys.exit() has failed, which counts; the relay goes on."""
    exits.append("1")
    publish_each([1, 2], local)
    Relay().drain()
    assert states(local) == {1: "pending", 2: "done"}
    message = OutboxMessage.objects.using(local).get(payload="1")
    assert message.attempts == 1
    assert "SystemExit(3)" in message.error
    record = IdempotencyKey.objects.using(local).get(key=message.message_id)
    assert (record.status, record.attempt) == ("failed", 1)


def test_dead(local: str) -> None:
    """What a consumer has dead-lettered is not sent to it again: it is dead here, too."""
    fails.add("1")
    publish_each([1], local)
    for _ in range(5):
        assert states(local) == {1: "pending"}
        make_due(local)
        Relay().drain()
    message = OutboxMessage.objects.using(local).get()
    assert message.state == "dead"
    assert "is dead-lettered by second n" in message.error
    assert "ValueError: 1" in message.error


def test_retry_of_a_dead_letter(local: str) -> None:
    """An operator's retry releases the consumer that had given the message up."""
    fails.add("1")
    publish_each([1], local)
    for _ in range(5):
        make_due(local)
        Relay().drain()
    assert states(local) == {1: "dead"}
    fails.clear()
    settle(OutboxMessage.objects.using(local).get(), "retry", by="alice")
    Relay().drain()
    assert states(local) == {1: "done"}
    assert handled == ["first 1", "second 1 /orders None"]


def test_bytes(using: str, broker: type[Broker]) -> None:
    """Bytes are sent as bytes."""
    with transaction.atomic(using=using):
        publish("orders", b"\x00\xff", type="n")
    Relay().drain()
    assert broker.got[0].data == b"\x00\xff"
    assert broker.got[0].event().data == b"\x00\xff"


@pytest.mark.parametrize("use_tz", [True, False])
def test_time(using: str, broker: type[Broker], use_tz: bool) -> None:
    """An event has the time of its message with a time zone, whatever USE_TZ and TIME_ZONE are."""
    with override_settings(USE_TZ=use_tz, TIME_ZONE="America/Chicago"):
        publish_each([1], using)
        Relay().drain()
        time = broker.got[0].event().time
    assert time is not None
    assert abs(time - datetime.now(UTC)) < timedelta(hours=1)


def test_more_than_one_statement_holds(using: str, broker: type[Broker]) -> None:
    """However many messages are published at once, they are all written, in their order."""
    with transaction.atomic(using=using):
        for number in range(1200):
            publish("orders", number, type="n", group="g")
    Relay(batch_size=400).drain()
    assert got() == list(range(1200))


def test_database_away(
    using: str,
    broker: type[Broker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A relay that cannot reach the database says so, and goes on when it can."""
    publish_each([1], using)
    claim, away = relay_module.Batch.claim, [True, True]

    def claim_later(*arguments: Any) -> Any:
        if away:
            away.pop()
            raise OperationalError("away")
        return claim(*arguments)

    monkeypatch.setattr(relay_module.Batch, "claim", claim_later)
    stop = threading.Event()

    def relay() -> None:
        run([Part("relay", Relay().work, timedelta(seconds=0.01))], stop)

    def wait() -> None:
        try:
            eventually(lambda: got() == [1])
        finally:
            stop.set()
            connections.close_all()

    in_threads([relay, wait])
    assert caplog.text.count("The relay met an error of its database") == 2
