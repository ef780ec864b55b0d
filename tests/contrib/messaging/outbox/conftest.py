"""A broker that tests can look into, and that refuses what they tell it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from django.conf import settings
from django.db import transaction
from django.test import override_settings

from idempotency_django.contrib.messaging import Batch, Event, Publisher, publish


class Broker(Publisher):
    """Keeps what it gets, in the order that it comes in."""

    got: list[Event] = []
    refused: Exception | None = None
    refuse: Callable[[Event], Exception | None] = staticmethod(lambda message: None)
    before: Callable[[Sequence[Event]], None] = staticmethod(lambda messages: None)

    def publish(self, batch: Batch) -> None:
        type(self).before(batch.messages)
        super().publish(batch)

    def send(self, message: Event) -> None:
        self.refused = type(self).refuse(message)
        if self.refused is not None:
            raise self.refused
        self.got.append(message)

    def is_outage(self, error: Exception) -> bool:
        return error is not self.refused


def publish_order(topic: str = "orders") -> None:
    with transaction.atomic():
        publish(topic, {"order": 17}, type="order.paid")


def outbox(**topics: Any) -> Any:
    """Settings with these topics; ``"orders"`` goes to the broker above."""
    orders = {
        "BACKEND": "tests.contrib.messaging.outbox.conftest.Broker",
        **topics.pop("orders", {}),
    }
    return changed_settings(OUTBOX={"orders": orders, **topics})


def changed_settings(**names: Any) -> Any:
    """Settings with these names in ``IDEMPOTENCY``; the others stay as they are."""
    return override_settings(IDEMPOTENCY={**getattr(settings, "IDEMPOTENCY", {}), **names})
