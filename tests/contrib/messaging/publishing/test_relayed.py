"""From the transaction to the effect of a consumer, over each broker."""

from __future__ import annotations

import json
import signal
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from idempotency_django.contrib.messaging import (
    Consumer,
    Event,
    Refused,
    Relay,
    publish,
)
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.errors import OperationInProgress
from tests.contrib.messaging.brokers import Broker
from tests.contrib.messaging.conftest import broker as memory  # noqa: F401  # a fixture
from tests.contrib.messaging.outbox.conftest import Broker as Memory
from tests.contrib.messaging.outbox.conftest import outbox
from tests.models import Effect
from tests.support.nightly import few
from tests.support.outside import environment, running
from tests.support.shared import LONG_AGO

from .conftest import BROKERS

pytestmark = pytest.mark.django_db(transaction=True)
LONGEST = 120  # seconds


def consumer() -> Consumer:
    """A consumer whose effects are counted."""
    billing = Consumer("billing")

    @billing.on("order.paid")
    def book(event: Event, execution: Any) -> None:
        Effect.objects.create(reference=event.id)

    return billing


def in_progress(seconds: float) -> OperationInProgress:
    """The error where another process is handling the message for so long."""
    error = OperationInProgress()
    error.remaining = seconds
    return error


def relayed(broker: Broker, *kill: str) -> int:
    """Run a relay in a process of its own; how it ended."""
    topics = {"orders": {"BACKEND": broker.backend, "OPTIONS": broker.publishing()}}
    with running(
        "-m",
        "tests.contrib.messaging.publishing.relay",
        json.dumps(topics),
        *kill,
        env=environment(),
    ) as process:
        return process.wait(LONGEST)


@pytest.mark.e2e
@pytest.mark.parametrize("broker", few(BROKERS), indirect=True)
def test_killed_after_sending(broker: Broker, request: pytest.FixtureRequest) -> None:
    """A relay that is killed after the broker has confirmed, and before it has noted that, leaves
    messages that are sent again with the same ids. Each has one effect, in the order of its group.
    """
    with outbox(), transaction.atomic():
        ids = [
            publish("orders", {"id": at}, type="order.paid", group="ab"[at % 2]) for at in range(6)
        ]
    assert relayed(broker, "kill") == -signal.SIGKILL
    assert set(OutboxMessage.objects.values_list("state", flat=True)) == {"pending"}
    OutboxMessage.objects.update(process_after=LONG_AGO)  # its lease is over
    assert relayed(broker) == 0
    assert set(OutboxMessage.objects.values_list("state", flat=True)) == {"done"}

    twice = "fifo" not in request.node.name  # there SQS itself drops what is sent again
    events = broker.events(len(ids) * (2 if twice else 1))
    assert Counter(event.id for event in events) == Counter(ids * (2 if twice else 1))
    billing = consumer()
    for event in events:
        billing.handle(event)
    assert Counter(Effect.objects.values_list("reference", flat=True)) == Counter(ids)
    if request.node.callspec.params["broker"] != "sqs":  # a standard queue has no order
        firsts = list(dict.fromkeys(event.id for event in events))
        for group in ("a", "b"):
            wanted = [each for at, each in enumerate(ids) if "ab"[at % 2] == group]
            assert [each for each in firsts if each in wanted] == wanted


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("error", "state", "attempts", "delay"),
    [
        (ValueError("no"), "pending", 1, timedelta(0)),
        (Refused("busy", delay=timedelta(minutes=10)), "pending", 1, timedelta(seconds=590)),
        (in_progress(seconds=600), "pending", 0, timedelta(seconds=590)),
        (Refused("gone", final=True), "dead", 1, None),
    ],
)
@pytest.mark.parametrize("group", [None, "a"])
def test_what_a_publisher_refuses(
    error: Exception, state: str, attempts: int, delay: timedelta | None, group: str | None
) -> None:
    """A publisher says when a message is to be sent again, whether that was an attempt at it, and
    that no other will do.
    """
    Memory.refuse = staticmethod(lambda message: error)
    with transaction.atomic():
        publish("orders", {}, type="order.paid", group=group)
    Relay().drain()
    message = OutboxMessage.objects.get()
    assert (message.state, message.attempts) == (state, attempts)
    if delay is None:
        assert message.process_after is None
    else:
        assert message.process_after - message.created_at >= delay
    if delay != timedelta(0):
        Memory.refuse = staticmethod(lambda message: None)
        with transaction.atomic():
            publish("orders", {}, type="order.paid", group=group)
        assert Relay().drain() == (0 if group else 1)  # its group waits


@pytest.mark.usefixtures("memory")
def test_never_used_up_by_others() -> None:
    """That another process has it in hand never uses up a message's attempts."""
    Memory.refuse = staticmethod(lambda message: OperationInProgress())
    with outbox(orders={"MAX_ATTEMPTS": 1}):
        with transaction.atomic():
            publish("orders", {}, type="order.paid")
        for _ in range(3):
            OutboxMessage.objects.update(process_after=LONG_AGO, attempts=1)
            Relay().drain()
    assert OutboxMessage.objects.get().state == "pending"
