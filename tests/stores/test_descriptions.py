"""What objects say of themselves: in the admin, in a shell and in logs."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta

import pytest
from django.db.models import Model

from idempotency_django.contrib.messaging import Consumer
from idempotency_django.contrib.messaging.models import (
    Heartbeat,
    InboxMessage,
    OutboxMessage,
    OutboxStream,
    StreamPosition,
)
from idempotency_django.models import IdempotencyKey, IdempotencyStep
from idempotency_django.policy import UNSET, Policy


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (IdempotencyKey(key="k", scope="s"), "k (s)"),
        (IdempotencyStep(name="charge"), "charge"),
        (InboxMessage(message_id="m", source="stripe"), "m (stripe)"),
        (OutboxMessage(message_id="m", topic="orders"), "m (orders)"),
        (OutboxStream(stream="orders/17"), "orders/17"),
        (StreamPosition(stream="orders/17"), "orders/17"),
        (Heartbeat(name="relay", process="web-1, process 7"), "relay (web-1, process 7)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rows_are_named_as_the_operator_knows_them(row: Model, text: str) -> None:
    """By key and scope, by id and origin, by name."""
    assert str(row) == text


def test_consumer_names_what_it_handles() -> None:
    """Nothing yet, and then its types of events."""
    consumer = Consumer("billing")
    assert repr(consumer) == "<Consumer 'billing' of nothing yet>"
    consumer.on("order.paid", "order.sent")(lambda event: None)
    assert repr(consumer) == "<Consumer 'billing' of order.paid, order.sent>"


def test_copied_policy_is_equal_and_unset_stays_unset() -> None:
    """In the same process, and in another one that unpickles it."""
    policy = Policy(ttl=timedelta(days=3), required=frozenset({"POST"}))
    for made in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert made == policy
        assert hash(made) == hash(policy)
        assert made.lease is UNSET
    assert repr(UNSET) == "UNSET"
