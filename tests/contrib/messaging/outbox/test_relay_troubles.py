"""What goes wrong around a relay, rather than in what it sends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import OperationalError, transaction

from idempotency_django.contrib.messaging import (
    Event,
    Relay,
    after_commit,
    loops,
)
from idempotency_django.contrib.messaging.loops import Part, run
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.contrib.messaging.outbox.relay import Batch
from idempotency_django.testing import eventually, in_threads

from .conftest import Broker, outbox, publish_order

pytestmark = pytest.mark.django_db(transaction=True)


BACKEND = "tests.contrib.messaging.outbox.conftest.Broker"


def part(relay: Relay | None = None) -> Part:
    """A relay, as ``run_messaging`` runs it."""
    return Part("relay", (relay or Relay()).work, timedelta(seconds=0.01))


def test_ctrl_c_ends_the_relay(broker: type[Broker]) -> None:
    """It is no failure of the messages that are being sent: they are due again after the lease."""

    def interrupt(messages: Sequence[object]) -> None:
        raise KeyboardInterrupt

    broker.before = staticmethod(interrupt)  # type: ignore[assignment]
    publish_order()
    with pytest.raises(KeyboardInterrupt):
        Relay().drain()
    assert OutboxMessage.objects.get().state == "pending"


def test_relay_waits_for_the_database(
    broker: type[Broker], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it cannot be reached, the relay says so, loses nothing, and tries again."""
    stop, real, left = threading.Event(), Batch.claim, [OperationalError("gone away")] * 3

    def claim(*arguments: Any) -> Batch:
        if left:
            raise left.pop()
        return real(*arguments)

    monkeypatch.setattr(Batch, "claim", claim)
    broker.before = staticmethod(lambda messages: stop.set())  # type: ignore[assignment]
    publish_order()
    run([part()], stop)
    assert len(broker.got) == 1
    said = "The relay met an error of its database, and will retry. No message is lost"
    assert caplog.text.count(said) == 3


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler hangs for the loop as soon as it has begun."""
    monkeypatch.setattr(loops, "PATIENCE", timedelta(seconds=0.05))
    monkeypatch.setattr(loops, "BEAT", 0.01)


def run_until(stop: threading.Event, relay: Relay, *others: Callable[[], object]) -> None:
    """Run the relay beside the others, the last of which ends it."""

    def operator() -> None:
        try:
            others[-1]()
        finally:
            stop.set()

    in_threads([partial(run, [part(relay)], stop), *others[:-1], operator])


@pytest.mark.usefixtures("impatient")
def test_other_topics_go_on_beside_one_that_hangs(
    broker: type[Broker], caplog: pytest.LogCaptureFixture
) -> None:
    """The messages claimed with it, too, after their lease; what hangs is sent once, and its topic
    goes on after it.
    """
    stop, hangs, released = threading.Event(), threading.Event(), threading.Event()

    def hang(messages: Sequence[Event]) -> None:
        if messages[0].source == "/orders":
            hangs.set()
            assert released.wait(30)

    broker.before = staticmethod(hang)  # type: ignore[assignment]
    topics = {"bills": {"BACKEND": BACKEND}, "mails": {"BACKEND": BACKEND}}

    def sent() -> list[str]:
        return [message.source.removeprefix("/") for message in broker.got]

    def operator() -> None:
        assert hangs.wait(30)
        publish_order("mails")
        publish_order()
        eventually(lambda: sorted(sent()) == ["bills", "mails"])
        assert "All others go on in another thread." in caplog.text
        released.set()
        eventually(lambda: not OutboxMessage.objects.exclude(state="done").exists())

    with outbox(**topics):
        publish_order()
        publish_order("bills")
        # The lease is half over after the hang has begun: nothing else of the batch is begun.
        run_until(stop, Relay(lease=timedelta(seconds=1)), operator)
    assert sorted(sent()) == ["bills", "mails", "orders", "orders"]


@pytest.mark.usefixtures("impatient")
def test_call_that_hangs_is_not_called_twice(broker: type[Broker]) -> None:
    """Its record has an owner while it hangs, and the calls after it wait."""
    stop = threading.Event()
    CALLS.clear()
    RELEASED.clear()

    def operator() -> None:
        eventually(lambda: CALLS == [1])
        publish_order()
        eventually(lambda: len(broker.got) == 1)
        assert CALLS == [1]
        RELEASED.set()
        eventually(lambda: CALLS == [1, 2])

    with transaction.atomic():
        after_commit(hang_in_call, 1)
    with transaction.atomic():
        after_commit(hang_in_call, 2)
    run_until(stop, Relay(lease=timedelta(seconds=1)), operator)
    assert CALLS == [1, 2]


CALLS: list[int] = []
RELEASED = threading.Event()


def hang_in_call(number: int) -> None:
    CALLS.append(number)
    assert RELEASED.wait(30)


@pytest.mark.usefixtures("impatient")
def test_fresh_thread_that_dies_ends_the_relay(
    broker: type[Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its error; what the one that hangs has sent is noted when it returns."""
    released = threading.Event()
    broker.before = staticmethod(lambda messages: released.wait(30))  # type: ignore[assignment]
    relay, work, owner = Relay(), Relay.work, threading.Lock()

    def dies_elsewhere(self: Relay) -> bool:
        if owner.acquire(blocking=False):
            return work(self)
        released.set()
        raise ZeroDivisionError

    monkeypatch.setattr(Relay, "work", dies_elsewhere)
    publish_order()
    with pytest.raises(ZeroDivisionError):
        run([part(relay)], threading.Event())
    eventually(lambda: OutboxMessage.objects.get().state == "done")
