"""Messages as the relay hands them to a publisher."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from idempotency_django.contrib.messaging import Batch, Event, Publisher

CREATED = datetime(2031, 5, 7, 9, 30, tzinfo=UTC)


def outgoing(name: str, group: str = "", sequence: int = 0, **values: Any) -> Event:
    """A message with that id, as the relay makes it."""
    topic = values.pop("topic", "orders")
    extensions: dict[str, str | int | bool] = {"causedby": f"{name} outbox:{topic}"}
    if group:
        extensions["sequence"] = sequence
    return Event(
        id=name,
        source=f"/{topic}",
        subject=group or None,
        time=CREATED,
        extensions=extensions,
        **{"type": "order.paid", "data": {"order": name}, **values},
    )


def grouped(*names: str, **values: Any) -> list[Event]:
    """Messages that are named by their groups: ``"a-1"`` is the first one of the group "a"."""
    return [
        outgoing(name, group, int(sequence), **values)
        for name, (group, _, sequence) in zip(
            names, (name.partition("-") for name in names), strict=True
        )
    ]


class NotSent(Exception):
    """Stands for a message that was not tried."""


class Outage(Exception):
    """Stands for a message that was not sent, because of an error that affects all of them."""


def published(
    publisher: Publisher, messages: Sequence[Event], deadline: float = math.inf
) -> list[Exception | None]:
    """What has become of each message, as a relay finds out."""
    batch = Batch(messages, deadline)
    unsent: Exception = NotSent()
    try:
        publisher.publish(batch)
    except Exception as error:  # noqa: BLE001  # as a relay does
        publisher.close()
        unsent = Outage(repr(error))
    return [batch.results.get(message.id, unsent) for message in messages]


def failures(results: Sequence[Exception | None]) -> list[bool]:
    """Which of the messages were not confirmed."""
    return [result is not None for result in results]
