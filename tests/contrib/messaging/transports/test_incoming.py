"""Events in the messages of any broker, in both modes, and what is no event."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idempotency_django.contrib.messaging import Event
from idempotency_django.contrib.messaging.brokers.loop import Incoming, as_text, event_of

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
NAMES = {"specversion": "1.0", "id": "1", "source": "/shop", "type": "order.paid"}


def incoming(headers: list[tuple[str, Any]], body: bytes = b"") -> Incoming:
    """A message."""
    return Incoming("place", body, headers, False, lambda: None)


@given(TEXTS, TEXTS, TEXTS, st.sampled_from(["ce_", "ce-", "cloudEvents:", "cloudEvents_"]))
def test_binary(number: str, source: str, subject: str, prefix: str) -> None:
    """Attributes are texts as they are: no quotes, no percent signs have a meaning."""
    attributes = {**NAMES, "id": number, "source": source, "subject": subject}
    headers = [(f"{prefix}{name}", value.encode()) for name, value in attributes.items()]
    event = event_of(incoming([*headers, ("content-type", b"application/json")], b'{"a": 1}'))
    assert event == Event(
        id=number,
        source=source,
        type="order.paid",
        subject=subject,
        data={"a": 1},
        datacontenttype="application/json",
    )


@pytest.mark.parametrize(
    "content_type", [None, "", "text/plain", "application/json", "application/cloudevents+json"]
)
def test_structured(content_type: str | None) -> None:
    """JSON in the body is an event, whatever type its sender has set."""
    event = Event(id="1", source="/shop", type="order.paid", data={"a": "ü"})
    headers = [("content-type", content_type), ("other", b"\xff")]
    assert event_of(incoming(headers, event.to_json().encode())) == event


def test_values_of_amqp() -> None:
    """AMQP has numbers, booleans and times of its own."""
    time = datetime(2031, 5, 7, 9, 30, tzinfo=UTC)
    headers = [(f"cloudEvents:{name}", value) for name, value in NAMES.items()]
    more = [("cloudEvents:time", time), ("cloudEvents:n", 7), ("cloudEvents:yes", True)]
    event = event_of(incoming([*headers, *more]))
    assert (event.time, event.extensions) == (time, {"n": "7", "yes": "true"})


@pytest.mark.parametrize(
    ("headers", "body", "text"),
    [
        ([], b"", "not JSON"),
        ([("content-type", "text/plain")], b"hello", "not JSON"),
        ([("content-type", "application/cloudevents-batch+json")], b"[]", "list in JSON"),
        ([("ce_id", "1")], b"", "no specversion"),
        ([*((f"ce_{k}", v) for k, v in NAMES.items()), ("ce-id", "2")], b"", "two headers"),
        ([("ce_id", b"\xff")], b"", "not text in UTF-8"),
    ],
)
def test_no_event(headers: list[tuple[str, Any]], body: bytes, text: str) -> None:
    """What is no event is refused with what is wrong."""
    with pytest.raises(ValueError, match=text):
        event_of(incoming(headers, body))


@given(st.lists(st.tuples(st.text(), st.one_of(st.binary(), st.text(), st.none()))), st.binary())
def test_anything(headers: list[tuple[str, Any]], body: bytes) -> None:
    """Whatever comes, it is an event or a ValueError; and its headers can be kept as texts."""
    message = incoming(headers, body)
    assert all(isinstance(as_text(value), str) for _, value in headers)
    with suppress(ValueError):
        event_of(message)
