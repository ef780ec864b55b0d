"""Our own consumers and calls, killed and paused at every boundary on every database."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from idempotency_django.contrib.messaging import Consumer, Event
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.testing.chaos.harness import Report, Service, chaos

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.django_db(transaction=True, databases="__all__"),
]


def event(number: int) -> Event:
    return Event(id=f"e-{number}", source="/tests", type="paid", data=number)


def test_transactional(database: str, survives: Callable[[Report], None]) -> None:
    """The effects of an event and its record are committed together."""
    consumer = Consumer("billing")

    @consumer.on("paid")
    def book(event: Event, execution: ExecutionContext) -> None:
        Effect.objects.create(reference=event.id)

    report = chaos(consumer.handle, event, lambda e: Effect.objects.filter(reference=e.id).count())
    survives(report)


def test_leased(database: str, survives: Callable[[Report], None]) -> None:
    """Each step is done once; a process whose lease is over while it is paused commits nothing."""
    provider = Service("provider")
    consumer = Consumer("billing", policy=Policy(mode="leased"))

    @consumer.on("paid")
    def book(event: Event, execution: ExecutionContext) -> None:
        execution.step("pay", lambda: provider.call(event.id, key=execution.derive_key("pay")))
        execution.step("book", lambda: Effect.objects.create(reference=event.id).pk)

    report = chaos(
        consumer.handle,
        event,
        lambda e: {
            "entries": Effect.objects.filter(reference=e.id).count(),
            "paid": provider.effects(e.id),
        },
    )
    survives(report)
    assert any(trial.what.endswith(", lease over") for trial in report.trials)
