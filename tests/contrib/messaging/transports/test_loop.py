"""The loop of ``run_consumer``: what it does with each message, and when."""

from __future__ import annotations

import os
import signal
import sys
import threading
from asyncio import CancelledError
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import DataError, OperationalError, connection, connections
from hypothesis import given
from hypothesis import strategies as st

from idempotency_django.contrib.messaging import (
    Consumer,
    Event,
    dead_letters,
    heartbeats,
    loops,
)
from idempotency_django.contrib.messaging.brokers import loop as running
from idempotency_django.contrib.messaging.brokers.loop import as_text
from idempotency_django.contrib.messaging.models import InboxMessage, RunningProcess
from idempotency_django.errors import (
    OperationInProgress,
    StoreUnavailable,
)
from idempotency_django.management import stop_on_signals
from idempotency_django.models import DatabaseNow, IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.testing import eventually
from tests.contrib.messaging.events import paid
from tests.models import Effect
from tests.support.reports import status

from .memory import Lost, Memory

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _no_handler_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a test says so, also on a machine that is."""
    monkeypatch.setattr(running, "POLL", 10.0)


class Billing:
    """A consumer that makes an effect of each event; ``fail`` is called with the event first."""

    def __init__(self, **options: Any) -> None:
        self.consumer = Consumer("billing", **options)
        self.fail = lambda event: None
        self.redelivered: list[bool] = []
        real = self.consumer.handle

        def handle(event: Event, **arguments: Any) -> Any:
            self.redelivered.append(arguments["redelivered"])
            return real(event, **arguments)

        self.consumer.handle = handle  # type: ignore[method-assign]
        self.consumer.on("order.paid")(self.book)

    def book(self, event: Event, execution: Any) -> None:
        Effect.objects.create(reference=event.id)
        self.fail(event)


def leased() -> Billing:
    """One whose handler is in no transaction, so that on SQLite it keeps no heartbeat waiting."""
    return Billing(policy=Policy(mode="leased"))


def raising(*errors: Exception | None) -> Any:
    """A function that raises these errors, one at each call, and then nothing."""
    left = list(errors)

    def call(*_: Any, **__: Any) -> None:
        error = left.pop(0) if left else None
        if error is not None:
            raise error

    return call


def effects() -> list[str]:
    """The effects, in order."""
    return [*Effect.objects.order_by("pk").values_list("reference", flat=True)]


def test_acknowledged_after_the_commit() -> None:
    """When a message is acknowledged, everybody can see its effect."""
    memory = Memory(paid("a"), paid("a"), paid("b"))
    seen: list[list[str]] = []
    memory.when["acknowledge"] = lambda: seen.append(effects())
    done = memory.run(Billing().consumer)
    assert done == ["open", "acknowledge a", "acknowledge a", "acknowledge b", "close"]
    assert seen == [["a"], ["a"], ["a", "b"]]


def test_a_failure_is_tried_again() -> None:
    """A handler that fails has no effect, and its message is handled as one that came before."""
    billing = Billing()
    billing.fail = raising(ValueError("not yet"))
    done = Memory(paid("a")).run(billing.consumer)
    assert done == ["open", "acknowledge a", "close"]
    assert billing.redelivered == [False, True]
    assert effects() == ["a"]


@pytest.mark.parametrize("error", [OperationInProgress(), StoreUnavailable()])
def test_never_used_up_by_others(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """While somebody else handles it, or the database is down, a message is in hand, and nothing
    else is fetched. That is never counted.
    """
    billing = Billing(max_attempts=1)
    real, outage = billing.consumer.handle, raising(error, error, error)

    def handle(event: Event, **arguments: Any) -> Any:
        outage()
        return real(event, **arguments)

    monkeypatch.setattr(billing.consumer, "handle", handle)
    memory = Memory(paid("a"), paid("b"))
    done = memory.run(billing.consumer)
    assert done == ["open", "acknowledge a", "acknowledge b", "close"]
    assert billing.redelivered == [False, False]
    assert not InboxMessage.objects.exists()


def test_the_database_stays_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is stopped meanwhile acknowledges nothing."""
    billing, memory = Billing(), Memory(paid("a"), paid("b"))

    def handle(event: Event, **arguments: Any) -> None:
        memory.stop.set()
        raise StoreUnavailable

    monkeypatch.setattr(billing.consumer, "handle", handle)
    assert memory.run(billing.consumer) == ["open", "close"]


def test_dead_letter_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A message is not forgotten before it is dead-lettered, and the log says what is wrong."""
    real = dead_letters.keep
    outage = raising(OperationalError("gone"), DataError("too large"))

    def keep(*arguments: Any, **options: Any) -> None:
        outage()
        real(*arguments, **options)

    monkeypatch.setattr(dead_letters, "keep", keep)
    done = Memory(b"{").run(Billing().consumer)
    assert done == ["open", "acknowledge ?", "close"]
    assert InboxMessage.objects.get().source == "consumer:billing"
    assert "(1 bytes) cannot be stored as a dead letter" in caplog.text


def test_the_broker_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    """The loop connects again, and what comes again is a duplicate."""
    memory = Memory(paid("a"), paid("a"), paid("b"))
    memory.when["acknowledge"] = raising(Lost("reset"))
    memory.when["open"] = raising(None, Lost("refused"))
    memory.when["close"] = raising(Lost("gone already"))
    done = memory.run(Billing().consumer)
    lost = ["open", "acknowledge a", "close", "open", "close", "open"]
    assert done == [*lost, "acknowledge a", "acknowledge b", "close"]
    assert effects() == ["a", "b"]
    assert [record.message for record in caplog.records] == [
        f"The consumer billing cannot reach its broker (memory) and will reconnect: Lost('{why}')"
        for why in ("reset", "refused")
    ]


def test_a_slow_handler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While a handler runs, the broker hears of its message, and the health file is touched."""
    monkeypatch.setattr(running, "POLL", 0.01)
    monkeypatch.setattr(loops, "BEAT", 0.01)
    billing, memory, beats = leased(), Memory(paid("a")), threading.Semaphore(0)
    health = tmp_path / "health"
    memory.when["beat"] = beats.release

    def wait(event: Event) -> None:
        health.unlink()
        while beats.acquire(blocking=False):  # those before it
            pass
        for _ in range(3):
            assert beats.acquire(timeout=30)
        eventually(health.exists)

    billing.fail = wait
    done = memory.run(billing.consumer, health=str(health))
    assert done == ["open", "acknowledge a", "close"]


def names_of(rows: Any) -> list[str]:
    return [*rows.values_list("name", flat=True)]


def test_heartbeat() -> None:
    """The process has a row while it runs, which says what it does, and none after a clean end."""
    seen: list[list[str]] = []
    billing, memory = leased(), Memory(paid("a"))
    billing.fail = lambda event: eventually(RunningProcess.objects.exists)
    memory.when["acknowledge"] = lambda: seen.append(names_of(RunningProcess.objects))
    memory.run(billing.consumer)
    assert seen == [["consumer billing from memory"]]
    assert names_of(RunningProcess.objects) == []


def test_a_handler_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The log says what hangs, with the stacks. Its process gives no sign of life any more: not in
    its row, which the status names, nor in the health file, nor to the broker, which gives the
    message to another one.
    """
    monkeypatch.setattr(running, "POLL", 0.01)
    monkeypatch.setattr(loops, "BEAT", 0.01)
    monkeypatch.setattr(heartbeats, "INTERVAL", 0.0)
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    billing = leased()
    memory, health, beats = Memory(paid("a")), tmp_path / "health", list[None]()
    memory.when["beat"] = lambda: beats.append(None)

    def hang_here(event: Event) -> None:
        eventually(RunningProcess.objects.exists)
        monkeypatch.setattr(loops, "HANDLER_TIMEOUT", timedelta(microseconds=1))
        eventually(lambda: "CRITICAL" in caplog.text)
        health.unlink()
        beats.clear()
        RunningProcess.objects.update(beat_at=DatabaseNow() - timedelta(minutes=2))
        looks = threading.Semaphore(0)
        monkeypatch.setattr(loops.Part, "go_on", lambda *_: looks.release())
        for _ in range(3):
            assert looks.acquire(timeout=30)
        assert not health.exists()
        assert "it hangs, was killed, or cannot reach the database" in status()

    billing.fail = hang_here
    done = memory.run(billing.consumer, health=str(health))
    assert done == ["open", "acknowledge a", "close"]
    assert beats == []
    [record] = [each for each in caplog.records if each.levelname == "CRITICAL"]
    assert "has handled the message at a for more than" in record.message
    assert "in hang_here" in capfd.readouterr().err


def test_lost_while_a_handler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler ends, nothing is acknowledged on a lost connection, and a duplicate follows."""
    monkeypatch.setattr(running, "POLL", 0.01)
    billing, memory = Billing(), Memory(paid("a"), paid("a"))
    lost = threading.Event()

    def beat() -> None:
        if not lost.is_set():
            lost.set()
            raise Lost("reset")

    memory.when["beat"] = beat
    billing.fail = lambda event: lost.wait(30)
    done = memory.run(billing.consumer)
    assert done == ["open", "close", "open", "acknowledge a", "close"]
    assert effects() == ["a"]


def test_signals() -> None:
    """SIGTERM lets the message in hand end, and none is fetched after it. A second one is Python's.

    The handlers of signals that were there before are there again afterwards.
    """
    billing, memory = Billing(), Memory(paid("a"), paid("b"))
    before = signal.getsignal(signal.SIGTERM)
    during: list[Any] = []

    def fail(event: Event) -> None:
        during.append(signal.getsignal(signal.SIGTERM))
        os.kill(os.getpid(), signal.SIGTERM)
        assert memory.stop.wait(30)
        during.append(signal.getsignal(signal.SIGTERM))

    billing.fail = fail
    with stop_on_signals(memory.stop):
        assert memory.run(billing.consumer) == ["open", "acknowledge a", "close"]
    assert effects() == ["a"]
    assert during[0] not in (before, signal.SIG_DFL)
    assert during[1] == before == signal.getsignal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("number", "kind"), [("\ud800", "order.paid"), ("ü" * 300, "order.\x00lost" + "t" * 300)]
)
def test_odd_events(number: str, kind: str) -> None:
    """Whatever is in an event, it is handled or dead-lettered; none of them stops the loop."""
    event = paid(number, type=kind, subject=number, data={"text": number})
    memory = Memory(event)
    done = memory.run(Billing(max_attempts=3).consumer)
    assert done == ["open", f"acknowledge {number}", "close"]
    assert len(effects()) + InboxMessage.objects.count() == 1


@pytest.mark.parametrize("kind", ["order.paid", "order.lost"])
@pytest.mark.parametrize(
    "odd", ['"data":{"x":1e999}', '"time":"9999-12-31T23:59:59-14:00"', '"data":"odd"']
)
def test_what_could_not_be_written(kind: str, odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that could be read, and perhaps not written again, holds up no process."""
    body = f'{{"specversion":"1.0","id":"a","source":"/shop","type":"{kind}",{odd}}}'.encode()
    billing, poison = Billing(max_attempts=1), raising(*[ValueError("poison")] * 9)
    billing.fail = lambda event: poison() if event.id == "a" else None
    memory = Memory(body, paid("b").to_json().encode())
    limit = threading.Timer(30, memory.stop.set)
    limit.start()
    monkeypatch.setattr(Event, "to_json", lambda self: 1 / 0)
    assert memory.run(billing.consumer) == ["open", "acknowledge ?", "acknowledge ?", "close"]
    limit.cancel()
    assert bytes(InboxMessage.objects.get().body) == body
    assert effects() == ["b"]


def test_connections_are_closed() -> None:
    """The thread that handlers run in leaves no connection to the database."""
    opened: list[Any] = []
    billing, memory = Billing(), Memory(paid("a"))

    def fail(event: Event) -> None:
        opened.append(connections["default"].connection)
        memory.stop.set()  # an idle process closes it as well

    billing.fail = fail
    memory.run(billing.consumer)
    assert opened
    assert opened[0] is not connection.connection
    with pytest.raises(Exception, match=r"closed|Closed|0"):
        opened[0].cursor().execute("SELECT 1")


class NoText(Exception):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise TypeError("detail")


def leave(event: Event) -> None:
    sys.exit(0)


@pytest.mark.parametrize("redelivered", [False, True])
@pytest.mark.parametrize("mode", ["transactional", "leased"])
@pytest.mark.parametrize(
    ("fail", "told"),
    [
        (leave, "SystemExit(0)"),
        (raising(*[ImproperlyConfigured("step() needs a lease")] * 20), "step() needs a lease"),
        (raising(*[NoText()] * 20), "NoText"),
        (raising(*[StopIteration()] * 20), "StopIteration"),
        (raising(*[CancelledError()] * 20), "CancelledError"),
    ],
    ids=["exit", "configuration", "no text", "StopIteration", "cancelled"],
)
def test_whatever_a_handler_raises(fail: Any, told: str, mode: Any, redelivered: bool) -> None:
    """Whatever a handler does on one message is that message's failure: it is dead after its
    attempts, and the others are handled.
    """
    billing = Billing(max_attempts=2, policy=Policy(mode=mode))
    billing.fail = lambda event: fail(event) if event.id == "p" else None
    again = ["p"] if redelivered else []
    memory = Memory(*map(paid, "apbc"), redelivered=again)
    memory.run(billing.consumer)
    assert {*effects()} >= {"a", "b", "c"}
    row = InboxMessage.objects.get()
    assert "is dead-lettered by" in row.error
    assert told in row.error
    record = IdempotencyKey.objects.get(key="p")
    assert (record.hold, record.attempt) == (True, 2)


@given(st.lists(st.tuples(st.text(), st.one_of(st.binary(), st.text(), st.none()))), st.binary())
def test_anything(headers: list[tuple[str, Any]], body: bytes) -> None:
    """Whatever comes, it is an event or a ValueError; and its headers can be kept as texts."""
    assert all(isinstance(as_text(value), str) for _, value in headers)
    with suppress(ValueError):
        Event.from_json(body)


def test_a_health_file_that_cannot_be_written(tmp_path: Path) -> None:
    """The loop does not begin without its probe."""
    memory = Memory()
    with pytest.raises(OSError, match="missing"):
        memory.run(Billing().consumer, health=str(tmp_path / "missing" / "health"))
    assert memory.done == []
