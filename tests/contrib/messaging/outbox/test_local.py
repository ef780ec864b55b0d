"""The publisher without a broker, and what else a message can be."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import transaction
from django.test import override_settings

from idempotency_django.contrib.messaging import Consumer, Relay, publish
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.errors import OperationInProgress, StoreUnavailable
from idempotency_django.models import IdempotencyKey
from tests.contrib.messaging.settling import settle

from .conftest import Broker, outbox
from .test_relay import make_due, publish_each, states

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

first, second = Consumer("first"), Consumer("second")
handled: list[str] = []
fails: set[str] = set()


@first.on("n")
def handle_first(event: Any, execution: Any) -> None:
    """What the first consumer does."""
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
    consumers = [f"{__name__}.first", f"{__name__}.second"]
    with outbox(orders={"BACKEND": "local", "OPTIONS": {"consumers": consumers}}):
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


def test_dead(local: str) -> None:
    """What a consumer has dead-lettered is not sent to it again: it is dead here, too, until an
    operator's retry releases that consumer.
    """
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
    fails.clear()
    settle(message, "retry", by="alice")
    Relay().drain()
    assert states(local) == {1: "done"}
    assert handled == ["first 1", "second 1 /orders None"]


@pytest.mark.parametrize("gone", [False, True])
def test_discarded(local: str, gone: bool) -> None:
    """What is discarded leaves no record that is held, unless its consumer is gone."""
    fails.add("1")
    publish_each([1], local)
    for _ in range(5):
        make_due(local)
        Relay().drain()
    left = {
        "BACKEND": "local",
        "OPTIONS": {"consumers": [f"{__name__}.{'gone' * gone or 'second'}"]},
    }
    with outbox(orders=left):
        settle(OutboxMessage.objects.using(local).get(), "discard", by="alice")
    assert states(local) == {1: "discarded"}
    records = IdempotencyKey.objects.using(local)
    assert [row.status for row in records.order_by("pk")][1:] == [
        "in_progress" if gone else "completed"
    ]


@pytest.mark.parametrize("use_tz", [True, False])
def test_time(using: str, broker: type[Broker], use_tz: bool) -> None:
    """An event has the time of its message, whatever TIME_ZONE is; without USE_TZ, it has none."""
    with override_settings(USE_TZ=use_tz, TIME_ZONE="America/Chicago"):
        publish_each([1], using)
        Relay().drain()
        time = broker.got[0].time
    assert (time is None) == (not use_tz)
    assert time is None or abs(time - datetime.now(UTC)) < timedelta(hours=1)
