"""Events in the messages of any broker, and what is no event."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idempotency_django.contrib.messaging import Event
from idempotency_django.contrib.messaging.brokers.loop import Incoming, as_text, event_of


def incoming(headers: list[tuple[str, Any]], body: bytes = b"") -> Incoming:
    """A message."""
    return Incoming("place", body, headers, False, lambda: None)


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/cloudevents+json"])
def test_structured(content_type: str | None) -> None:
    """JSON in the body is an event, whatever type its sender has set."""
    event = Event(id="1", source="/shop", type="order.paid", data={"a": "ü"})
    headers = [("content-type", content_type), ("other", b"\xff")]
    assert event_of(incoming(headers, event.to_json().encode())) == event


@given(st.lists(st.tuples(st.text(), st.one_of(st.binary(), st.text(), st.none()))), st.binary())
def test_anything(headers: list[tuple[str, Any]], body: bytes) -> None:
    """Whatever comes, it is an event or a ValueError; and its headers can be kept as texts."""
    message = incoming(headers, body)
    assert all(isinstance(as_text(value), str) for _, value in headers)
    with suppress(ValueError):
        event_of(message)
