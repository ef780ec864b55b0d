"""Batches whose connection is lost: only the event that loses it fails, and its attempts count."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from idempotency_django.contrib.messaging import Consumer, Duplicate, Event, Failed, Handled
from idempotency_django.contrib.messaging.errors import DeadLettered
from idempotency_django.decorators import idempotent
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.errors import OperationInProgress, StoreUnavailable
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import stores
from idempotency_django.testing import eventually, in_threads
from tests.models import Effect
from tests.support.shared import (
    assert_problem,
    close_connections,
    cut_connection,
    effects,
    new_key,
    post,
    record,
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


def idle(request: HttpRequest) -> HttpResponse:
    """Waits in its transaction for longer than the server allows."""
    Effect.objects.create(reference="idle")
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        [number] = cursor.fetchone()
        # Last: a slow machine may take longer than that from one statement to the next.
        cursor.execute("SET idle_in_transaction_session_timeout = '10ms'")

    def is_function_gone() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", [number])
            return bool(cursor.fetchone() == (0,))

    in_threads([lambda: eventually(is_function_gone)])
    return HttpResponse(status=201)


urlpatterns = [path("idle/", idempotent(idle))]


class ReasonLost(Exception):
    """The driver has heard that the connection is lost, and not why.

    On a busy machine, it often meets the closed connection before it reads the server's reason.
    """


def _lose_twice(client: Client, *, atomic: bool) -> None:
    key = new_key()
    for attempt in (1, 2):
        response = post(client, "/idle/", key)
        connection.close()
        assert effects("idle") == 0
        problem = assert_problem(response, 503, "store-unavailable")
        assert int(response["Retry-After"]) > 0
        if "did not confirm the commit" in problem["detail"]:  # which was sent
            raise ReasonLost
        assert "so nothing was committed" in problem["detail"]
        if atomic:  # nothing can be recorded in it any more
            assert not IdempotencyKey.objects.exists()
        else:
            assert (record(key).status, record(key).attempt) == ("failed", attempt)


@pytest.mark.skipif(connection.vendor != "postgresql", reason="the timeout is PostgreSQL's")
@pytest.mark.urls(__name__)
@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("combine", [True, False])
def test_idle_in_transaction(
    client: Client, monkeypatch: pytest.MonkeyPatch, *, atomic: bool, combine: bool
) -> None:
    """A transaction that the server ends because it was idle is 503, and nothing of it is there."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)
    monkeypatch.setattr(stores["default"], "combine_statements", combine)
    stores["default"].__dict__.pop("_dialect", None)
    try:
        for _ in range(20):
            with suppress(ReasonLost):
                _lose_twice(client, atomic=atomic)
                break
        else:
            pytest.fail("The driver never told why the connection was lost.")
    finally:
        stores["default"].__dict__.pop("_dialect", None)
