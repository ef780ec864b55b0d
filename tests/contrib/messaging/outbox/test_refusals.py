"""What the relay notes of a message that its publisher refuses."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import transaction

from idempotency_django.contrib.messaging import Refused, Relay, publish
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.errors import OperationInProgress
from tests.support.shared import LONG_AGO

from .conftest import Broker, outbox

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("broker")]


def in_progress(seconds: float) -> OperationInProgress:
    """The error where another process is handling the message for so long."""
    error = OperationInProgress()
    error.remaining = seconds
    return error


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
    Broker.refuse = staticmethod(lambda message: error)
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
        Broker.refuse = staticmethod(lambda message: None)
        with transaction.atomic():
            publish("orders", {}, type="order.paid", group=group)
        assert Relay().drain() == (0 if group else 1)  # its group waits


def test_never_used_up_by_others() -> None:
    """That another process has it in hand never uses up a message's attempts."""
    Broker.refuse = staticmethod(lambda message: OperationInProgress())
    with outbox(orders={"MAX_ATTEMPTS": 1}):
        with transaction.atomic():
            publish("orders", {}, type="order.paid")
        for _ in range(3):
            OutboxMessage.objects.update(process_after=LONG_AGO, attempts=1)
            Relay().drain()
    assert OutboxMessage.objects.get().state == "pending"
