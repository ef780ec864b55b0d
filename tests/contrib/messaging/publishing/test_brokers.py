"""What each publisher promises, on the real broker."""

from __future__ import annotations

import base64
import os
from typing import Any

import pytest

from idempotency_django.contrib.messaging import Event
from tests.contrib.messaging.brokers import Broker
from tests.support.rabbit import LARGEST

from .messages import NotSent, failures, grouped, outgoing, published


def plain(event: Event) -> tuple[Any, ...]:
    """What a consumer can tell of an event."""
    data = event.data if not isinstance(event.data, bytes) else base64.b64encode(event.data)
    causedby = event.extensions.get("causedby")
    return (event.id, event.source, event.type, event.subject, event.time, data, causedby)


def test_confirmed(broker: Broker) -> None:
    """A message that is confirmed is at the broker, and reads as it was published."""
    messages = [
        *grouped("a-1", "b-1", "a-2", "a-3", "b-2"),
        outgoing("text", data="Grüße, 世界"),
        outgoing("nothing", data=None),
        outgoing("bytes", data=b"\x00\xff"),
    ]
    with broker.publisher() as publisher:
        assert published(publisher, messages) == [None] * len(messages)
    events = broker.events(len(messages))
    assert {event.id: plain(event) for event in events} == {
        message.id: plain(message) for message in messages
    }
    assert len(events) == len(messages)
    assert [event.id for event in events if event.subject == "a"] == ["a-1", "a-2", "a-3"]
    assert [event.id for event in events if event.subject == "b"] == ["b-1", "b-2"]


@pytest.mark.skipif("TEST_RABBITMQ_URL" in os.environ, reason="its largest message is unknown")
@pytest.mark.parametrize("broker", ["rabbitmq", "kafka", "sqs", "sqs.fifo"], indirect=True)
def test_failure_within_a_group(broker: Broker) -> None:
    """After a message that fails, no later one of its group is sent. Others are."""
    poison = outgoing("a-2", "a", 2, data="x" * (LARGEST + 1))
    first, third, other = grouped("a-1", "a-3", "b-1")
    with broker.publisher() as publisher:
        results = published(publisher, [first, poison, third, other])
        assert failures(results) == [False, True, True, False]
        assert isinstance(results[2], NotSent)
        assert sorted(event.id for event in broker.events(2)) == ["a-1", "b-1"]
        published(publisher, grouped("a-2", "a-3"))
    assert [event.id for event in broker.events(2)] == ["a-2", "a-3"]


def test_each_attempt_has_the_same_id(broker: Broker, request: pytest.FixtureRequest) -> None:
    """A message that is sent again has its id again; a FIFO queue of SQS drops it itself."""
    with broker.publisher() as publisher:
        for _ in range(2):
            assert published(publisher, grouped("a-1")) == [None]
    expected = 1 if "fifo" in request.node.name else 2
    assert [event.id for event in broker.events(expected)] == ["a-1"] * expected
