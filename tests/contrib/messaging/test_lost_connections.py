"""Batches whose connection is lost: only the event that loses it fails, and its attempts count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections

from idempotency_django.contrib.messaging import Consumer, Duplicate, Event, Failed, Handled
from idempotency_django.contrib.messaging.errors import DeadLettered
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.errors import OperationInProgress, StoreUnavailable
from idempotency_django.models import IdempotencyKey
from tests.models import Effect
from tests.support.shared import (
    close_connections,
    cut_connection,
    effects,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.driver]

SIZE = 5
needs_server = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server")


@pytest.fixture(params=[pytest.param(cut_connection, marks=needs_server), close_connections])
def lose(request: pytest.FixtureRequest) -> Callable[[], object]:
    """How a handler loses its connection; only the next statement notices."""
    loses: Callable[[], object] = request.param
    return loses


def consumer(lose: Callable[[], object], *, writes: bool = True) -> Consumer:
    """A consumer whose handler loses its connection if the event says so.

    The handlers of the other events notice it if they write.
    """
    made = Consumer("billing", max_attempts=2)

    @made.on("order.paid")
    def book(event: Event, execution: ExecutionContext) -> Any:
        if writes or event.data["loses"]:
            Effect.objects.create(reference=event.id)
        if event.data["loses"]:
            lose()
        return event.id

    return made


def batch(*places: int) -> list[Event]:
    """Events, of which those at the given places lose the connection."""
    return [
        Event(id=f"{at}", source="/shop", type="order.paid", data={"loses": at in places})
        for at in range(SIZE)
    ]


def kinds(outcomes: list[Any]) -> list[type]:
    """What became of each event: the class of its outcome, or of its error."""
    return [type(each.error if isinstance(each, Failed) else each) for each in outcomes]


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("place", [0, 2, SIZE - 1])
def test_dead(lose: Callable[[], object], place: int, writes: bool) -> None:
    """Its neighbours commit at the first delivery; the event fails alone until it is dead."""
    billing = consumer(lose, writes=writes)
    error = StoreUnavailable if lose is cut_connection else ImproperlyConfigured
    others = [at for at in range(SIZE) if at != place]
    for kind in (Handled, Duplicate):
        told = kinds(billing.handle_many(batch(place)))
        assert [told[at] for at in others] == [kind] * len(others)
        while told[place] is OperationInProgress:  # until the server has ended the lost session
            told = kinds(billing.handle_many(batch(place)))
        assert issubclass(told[place], (error, DeadLettered))
        assert [effects(f"{at}") for at in others] == [int(writes)] * len(others)
    row = IdempotencyKey.objects.get(key=f"{place}")
    assert (row.attempt, row.hold) == (2, True)
    assert kinds(billing.handle_many(batch(place)))[place] is DeadLettered
    assert effects(f"{place}") == 0


@needs_server
@pytest.mark.parametrize("place", [0, SIZE - 1])
def test_unreachable(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """While the server cannot be reached, one of them tries; all of them learn the truth."""
    attempts: list[object] = []
    connect = connections["default"].get_new_connection

    def counted(given: Any) -> Any:
        attempts.append(given)
        return connect(given)

    with monkeypatch.context() as patched:

        def lose_for_good() -> None:
            cut_connection()
            patched.setitem(connection.settings_dict, "HOST", "127.0.0.1")
            patched.setitem(connection.settings_dict, "PORT", "1")
            patched.setattr(connections["default"], "get_new_connection", counted)

        outcomes = consumer(lose_for_good).handle_many(batch(place))
    assert kinds(outcomes) == [StoreUnavailable] * SIZE
    for outcome in outcomes:
        assert isinstance(outcome, Failed)
        assert "so nothing was committed" in str(outcome.error)
    assert len(attempts) < SIZE  # those of the transaction, and of the first one alone
    assert Effect.objects.count() == IdempotencyKey.objects.count() == 0
    assert kinds(consumer(bool).handle_many(batch())) == [Handled] * SIZE
