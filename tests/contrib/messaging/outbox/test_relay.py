"""The relay: in order, once more rather than never, and never past its lease."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from idempotency_django.contrib.messaging import Event, Relay, publish
from idempotency_django.contrib.messaging.brokers import base
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.contrib.messaging.outbox import relay as relay_module
from idempotency_django.models import DatabaseNow
from idempotency_django.testing import in_threads

from .conftest import Broker, outbox

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.usefixtures("broker"),
    pytest.mark.driver,
]

every_kind = pytest.mark.parametrize("group", ["g", None], ids=["grouped", "ungrouped"])


def publish_each(numbers: Sequence[int], using: str, group: str | None = None, **more: Any) -> None:
    """Publish each in a transaction of its own."""
    for number in numbers:
        with transaction.atomic(using=using):
            publish("orders", number, type="n", group=group, **more)


def got() -> list[int]:
    """What the broker has, in the order that it came in."""
    return [message.data for message in Broker.got]


def states(using: str) -> dict[int, str]:
    """The state of each message by its data."""
    rows = OutboxMessage.objects.using(using).values_list("payload", "state")
    return {int(payload): state for payload, state in rows}


def make_due(using: str) -> None:
    """All that waits, waits no longer; what is dead-lettered stays so."""
    past = DatabaseNow() - timedelta(seconds=1)
    waiting = OutboxMessage.objects.using(using).filter(state="pending")
    waiting.update(process_after=past)


def refuse(*numbers: int) -> None:
    """Have the broker refuse these."""

    def refused(message: Event) -> Exception | None:
        return ValueError("too large") if message.data in numbers else None

    Broker.refuse = staticmethod(refused)


@every_kind
def test_late_commit(using: str, group: str | None) -> None:
    """A transaction that publishes, and does not end, keeps no other message waiting, also of its
    group. What it commits after later messages were sent is sent as well.
    """
    if connections[using].vendor == "sqlite":
        pytest.skip("SQLite has one writer")
    publish_each([1, 2], using, group=group)
    written, commit = threading.Event(), threading.Event()

    def writer() -> None:
        with transaction.atomic(using=using):
            publish("orders", 3, type="n", group=group)
            written.set()
            assert commit.wait(30)

    def relay() -> None:
        assert written.wait(30)
        try:
            publish_each([4], using)
            Relay().drain()
            assert sorted(got()) == [1, 2, 4]
        finally:
            commit.set()

    in_threads([writer, relay])
    Relay().drain()
    assert got()[-1] == 3
    assert sorted(got()) == [1, 2, 3, 4]


@every_kind
def test_refused_once(using: str, group: str | None) -> None:
    """What the broker refuses is sent again later; the rest of its group waits, others do not."""
    publish_each([1, 2, 3], using, group=group)
    publish_each([9], using, group="other")
    refuse(2)
    relay = Relay()
    relay.drain()
    assert sorted(got()) == ([1, 9] if group else [1, 3, 9])
    assert "too large" in OutboxMessage.objects.using(using).get(payload="2").error
    refuse()
    assert relay.drain() == 0
    make_due(using)
    relay.drain()
    assert [number for number in got() if number != 9] == ([1, 2, 3] if group else [1, 3, 2])


@every_kind
def test_poison_dead(using: str, group: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """After its last attempt a message is dead-lettered, its group waits, and the log says so."""
    with outbox(orders={"MAX_ATTEMPTS": 2}):
        publish_each([1, 2], using, group=group)
        refuse(1)
        relay = Relay()
        for _ in range(3):
            relay.drain()
            make_due(using)
        refuse()
        relay.drain()
        assert states(using) == {1: "dead", 2: "pending" if group else "done"}
        assert got() == ([] if group else [2])
        assert "is a dead letter after attempt 2" in caplog.text


def test_broker_away(using: str, caplog: pytest.LogCaptureFixture) -> None:
    """That the broker cannot be reached is no attempt of any message."""
    publish_each([1], using, group="g")
    publish_each([2], using)

    def away(_: Sequence[Event]) -> None:
        raise ConnectionRefusedError("nobody listens")

    Broker.before = staticmethod(away)
    relay = Relay()
    assert relay.drain() == 0
    assert "The topic 'orders' waits" in caplog.text
    assert "nobody listens" in caplog.text
    assert not OutboxMessage.objects.using(using).exclude(attempts=0).exists()
    Broker.before = staticmethod(lambda messages: None)
    assert relay.drain() == 0  # it waits before it tries again
    Relay().drain()  # another one is free to
    assert sorted(got()) == [1, 2]


@every_kind
def test_paused_past_its_lease(using: str, group: str | None) -> None:
    """A relay that was paused can mark nothing over the next one; ids tell the duplicates."""
    publish_each([1, 2], using, group=group)
    other = Relay()

    def pause(_: Sequence[Event]) -> None:
        Broker.before = staticmethod(lambda messages: None)
        make_due(using)  # the lease is over
        refuse(2)
        other.drain()
        refuse()

    Broker.before = staticmethod(pause)
    Relay().send_batch()
    assert got() == [1, 1, 2]
    assert len({message.id for message in Broker.got}) == 2
    assert states(using) == {1: "done", 2: "pending"}
    assert OutboxMessage.objects.using(using).get(payload="2").attempts == 1
    make_due(using)
    other.drain()
    assert got() == [1, 1, 2, 2]
    assert states(using) == {1: "done", 2: "done"}


@every_kind
def test_slow_broker(using: str, group: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay begins nothing in the second half of its lease: what is left is due at once."""
    # Each message takes two seconds.
    clock = SimpleNamespace(monotonic=lambda: 1000.0 + 2 * len(Broker.got))
    monkeypatch.setattr(base, "time", clock)
    monkeypatch.setattr(relay_module, "time", clock)
    publish_each([1, 2, 3, 4, 5], using, group=group)
    relay = Relay(lease=timedelta(seconds=8))
    assert relay.send_batch() == 2
    assert set(OutboxMessage.objects.using(using).values_list("attempts", "error")) == {(0, "")}
    assert sorted(states(using).values()) == ["done"] * 2 + ["pending"] * 3
    assert Relay().drain() == 3
    assert got() == [1, 2, 3, 4, 5]


@every_kind
def test_killed_after_sending(using: str, group: str | None) -> None:
    """What was sent and not marked is sent again under the same id."""
    publish_each([1], using, group=group)

    class Killed(BaseException):
        """Stands for the end of the process."""

    relay = Relay()
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Killed):
        from idempotency_django.contrib.messaging.outbox import relay as batches

        def die(*_: object) -> None:
            raise Killed

        for name in ("mark_sent", "release"):
            patched.setattr(batches.Batch, name, die)
        relay.send_batch()
    assert Relay().drain() == 0  # until the lease is over
    make_due(using)
    Relay().drain()
    assert got() == [1, 1]
    assert len({message.id for message in Broker.got}) == 1


@every_kind
def test_two_relays(using: str, group: str | None) -> None:
    """Several relays share the work: each message is sent once, each group in its order."""
    for number in range(60):
        publish_each([number], using, group=group and f"g{number % 6}")
    in_threads([Relay(batch_size=7).drain for _ in range(4)])
    Relay().drain()
    assert sorted(got()) == list(range(60))
    for at in range(6 if group else 0):
        assert [number for number in got() if number % 6 == at] == list(range(at, 60, 6))


@every_kind
def test_statements(using: str, group: str | None) -> None:
    """A batch takes few statements, however many messages and groups are in it."""
    for number in range(50):
        publish_each([number], using, group=group and f"g{number % 10}")
    with CaptureQueriesContext(connections[using]) as queries:
        assert Relay().send_batch() == 50
    changes = [q["sql"] for q in queries if not q["sql"].startswith(("BEGIN", "COMMIT", "SET"))]
    assert len(changes) <= (10 if group else 6), changes
