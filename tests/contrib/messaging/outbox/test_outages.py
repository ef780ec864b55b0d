"""An outage is no message's fault, and no failure of one thing stops the relay."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from idempotency_django.backoff import Backoff
from idempotency_django.contrib.messaging import (
    Batch,
    Event,
    Publisher,
    Relay,
    after_commit,
    publish,
)
from idempotency_django.contrib.messaging.loops import Part, run
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.contrib.messaging.outbox import relay as sending
from idempotency_django.testing import eventually, in_threads
from tests.support.shared import cut_connection, effect_counts

from . import killing
from .conftest import Broker, outbox
from .test_relay import every_kind, got, make_due, publish_each, refuse, states

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.usefixtures("broker"),
    pytest.mark.driver,
]

OTHER = {"other": {"BACKEND": "tests.contrib.messaging.outbox.conftest.Broker"}}


class Mute(Publisher):
    """A publisher whose author forgot to note what has become of its messages."""

    asked: list[int] = []

    def publish(self, batch: Batch) -> None:
        self.asked.extend(message.data for message in batch.messages)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic whose broker was away is tried again at once."""
    monkeypatch.setattr(sending, "BACKOFF", Backoff(timedelta(0), timedelta(0)))


def attempts(using: str) -> dict[int, int]:
    """How many attempts are counted of each message, by its data."""
    rows = OutboxMessage.objects.using(using).values_list("payload", "attempts")
    return {int(payload): number for payload, number in rows}


def publish_to(topic: str, data: Any, using: str) -> None:
    with transaction.atomic(using=using):
        publish(topic, data, type="n")


def failing(*calls: int) -> Callable[[Sequence[Event]], None]:
    """A broker that is away whenever it is asked for one of these times."""
    asked = 0

    def away(_: Sequence[Event]) -> None:
        nonlocal asked
        asked += 1
        if asked in calls:
            raise ConnectionRefusedError("nobody listens")

    return away


@pytest.mark.usefixtures("no_pauses")
@every_kind
def test_broker_that_comes_and_goes(using: str, group: str | None) -> None:
    """However often the broker goes away and comes back, no message is blamed for it, and none is
    discarded.
    """
    with outbox(orders={"MAX_ATTEMPTS": 1}):
        for number in range(6):
            publish_each([number], using, group=group and f"g{number}")
        Broker.before = staticmethod(failing(1, 3, 5, 7))
        relay = Relay(batch_size=2)
        for _ in range(20):
            relay.send_batch()
        assert set(states(using).values()) == {"done"}
        assert set(attempts(using).values()) == {0}
    assert sorted(got()) == list(range(6))


@pytest.mark.usefixtures("no_pauses")
@every_kind
def test_publisher_that_raises_for_one_message(using: str, group: str | None) -> None:
    """A message for which sending raises is not blamed, and stops no others: they go before it."""
    with outbox(orders={"MAX_ATTEMPTS": 1}):
        publish_each([1], using, group=group)
        for number in range(2, 7):
            publish_each([number], using, group=group and f"g{number}")

        def fail(message: Event) -> None:
            if message.data == 1:
                raise TypeError("no such header")

        Broker.refuse = staticmethod(fail)
        relay = Relay()
        for _ in range(3):
            relay.send_batch()
        assert sorted(got()) == [2, 3, 4, 5, 6]
        assert states(using)[1] == "pending"
        assert attempts(using)[1] == 0
        message = OutboxMessage.objects.using(using).get(payload="1")
        assert "TypeError: no such header" in message.error
        Broker.refuse = staticmethod(lambda message: None)
        make_due(using)
        relay.drain()
    assert set(states(using).values()) == {"done"}


def test_what_was_confirmed_before_an_outage_is_noted(using: str) -> None:
    """When the broker goes away within a batch, what it had confirmed is not sent again."""

    def leave(message: Event) -> None:
        if message.data == 3:
            raise ConnectionError("The broker is restarting.")

    publish_each([1, 2, 3, 4], using)
    Broker.refuse = staticmethod(leave)
    relay = Relay()
    assert relay.send_batch() == 2
    assert states(using) == {1: "done", 2: "done", 3: "pending", 4: "pending"}
    refuse()
    Relay().drain()
    assert sorted(got()) == [1, 2, 3, 4]


def test_client_is_made_anew(using: str) -> None:
    """A publisher whose broker is away is closed, so that its next attempt has a new client."""
    closed: list[str] = []
    publish_each([1], using)
    Broker.before = staticmethod(failing(1))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Broker, "close", lambda self: closed.append(self.topic))
        relay = Relay()
        relay.drain()
        assert closed == ["orders"]


def test_publisher_that_notes_nothing(using: str) -> None:
    """Messages of a publisher that does not say what has become of them are dead letters at once,
    with what to do: they would be sent again and again. Other topics go on, and so does the relay.
    """
    with outbox(mute={"BACKEND": f"{__name__}.Mute"}, **OTHER):
        publish_to("mute", 1, using)
        publish_to("mute", 2, using)
        publish_to("other", 3, using)
        relay = Relay()
        relay.drain()
        assert got() == [3]
        assert attempts(using) == {1: 1, 2: 1, 3: 0}
        assert states(using) == {1: "dead", 2: "dead", 3: "done"}
        message = OutboxMessage.objects.using(using).get(payload="1")
        assert "Mute.publish() has not noted what has become of the message" in message.error


def test_publisher_that_exits(using: str, broker: type[Broker]) -> None:
    """It is an outage of its topic: what was sent is noted, and other topics go on."""
    broker.refuse = staticmethod(lambda message: exits(message.data == 2))  # type: ignore[assignment]
    with outbox(**OTHER):
        for number in (1, 2):
            publish_to("orders", number, using)
        publish_to("other", 3, using)
        Relay().send_batch()
        assert states(using) == {1: "done", 2: "pending", 3: "done"}
        assert "SystemExit" in OutboxMessage.objects.using(using).get(payload="2").error


def exits(wanted: bool) -> None:
    if wanted:
        sys.exit(1)


def test_publisher_that_cannot_be_made(using: str, caplog: pytest.LogCaptureFixture) -> None:
    """A topic whose publisher cannot be made waits, and says why; other topics go on."""
    with outbox(wrong={"BACKEND": "shop.nowhere.Publisher"}, **OTHER):
        publish_to("wrong", 1, using)
        publish_to("other", 2, using)
        relay = Relay()
        relay.drain()
        relay.close()
    assert got() == [2]
    assert attempts(using) == {1: 0, 2: 0}
    assert "The topic 'wrong' waits" in caplog.text
    assert "Correct BACKEND" in caplog.text


def missing(what: str) -> None:
    raise ImportError("a library is missing")


@pytest.mark.parametrize("inside", [False, True], ids=["module", "inside"])
@pytest.mark.parametrize("kind", ["local", "after_commit"])
def test_handlers_that_cannot_be_imported(
    using: str,
    kind: str,
    inside: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A handler that cannot be imported is the deployment's fault: no attempt is counted, the topic
    waits and says why, and the message is handled once the handler is back.
    """
    options = {"consumers": [f"{killing.__name__}.deadly"]}
    local = {"BACKEND": "local", "OPTIONS": options, "MAX_ATTEMPTS": 1}
    with outbox(local=local, after_commit={"MAX_ATTEMPTS": 1}):
        if kind == "local":
            publish_to("local", "works", using)
        else:
            with transaction.atomic(using=using):
                after_commit(killing.make, "works")
        with monkeypatch.context() as deployed:
            if inside:
                deployed.setattr(killing, "make", missing)
            else:
                deployed.setitem(sys.modules, killing.__name__, None)
            Relay().drain()
        message = OutboxMessage.objects.using(using).get()
        assert (message.state, message.attempts) == ("pending", 0)
        assert f"The topic {kind!r} waits" in caplog.text
        make_due(using)
        Relay().drain()
        assert OutboxMessage.objects.using(using).get().state == "done"
    assert effect_counts() == {"works": 1}


@every_kind
def test_database_lost_while_publishing(using: str, group: str | None) -> None:
    """A relay that loses its database while it publishes goes on. What was sent, and could not be
    noted, is sent again with its id once the lease is over.
    """
    if using != "default" or connections[using].vendor == "sqlite":
        pytest.skip("the connection of a server is cut, which is the first database")
    publish_each([1, 2, 3], using, group=group)
    left = [None]

    def lose(_: Sequence[Event]) -> None:
        if left:
            left.pop()
            cut_connection()

    Broker.before = staticmethod(lose)
    stop = threading.Event()

    def work() -> None:
        relay = Relay(batch_size=2, lease=timedelta(seconds=0.5))
        run([Part("relay", relay.work, timedelta(seconds=0.01))], stop)

    def wait() -> None:
        try:
            eventually(lambda: set(states(using).values()) == {"done"})
        finally:
            stop.set()

    in_threads([work, wait])
    assert {*got()} == {1, 2, 3}
    assert len({message.id for message in Broker.got}) == 3


def test_topic_that_no_relay_sends(using: str) -> None:
    """Messages whose topic was removed or renamed wait. The relay sends the rest; when
    the topic is back, they are sent.
    """
    broker: dict[str, Any] = {"BACKEND": "tests.contrib.messaging.outbox.conftest.Broker"}
    with outbox(gone=broker):
        publish_to("gone", 1, using)
    publish_to("orders", 3, using)
    relay = Relay()
    relay.drain()
    assert got() == [3]
    with outbox(gone=broker):
        Relay().drain()
    assert sorted(got()) == [1, 3]
