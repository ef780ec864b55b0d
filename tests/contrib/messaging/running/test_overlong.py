"""What takes longer than its lease is not silent: ``idempotency_status`` names it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from idempotency_django.contrib.messaging import Event, Relay, process_due, publish
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.models import DatabaseNow
from idempotency_django.testing import in_threads
from tests.contrib.messaging.outbox.conftest import Broker
from tests.contrib.messaging.webhooks.receivers import Stepping, deliver
from tests.models import Effect
from tests.support.reports import status

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

SIX_HOURS = timedelta(hours=6)


@pytest.fixture(autouse=True)
def _topic_and_receivers(broker: object, settings: Any) -> None:
    settings.ROOT_URLCONF = "tests.contrib.messaging.webhooks.receivers"


@pytest.mark.parametrize("group", ["g", None])
def test_publisher(using: str, group: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relays send a message in turns, each after the lease of the one before it. The message says
    so until a relay can note what came of it.
    """
    rows, relays, said = OutboxMessage.objects.using(using), [Relay(), Relay(), Relay()], []
    for number in (1, 2):
        with transaction.atomic(using=using):
            publish("orders", number, type="n", group=group)

    def slow(_: Sequence[Event]) -> None:
        rows.update(created_at=DatabaseNow() - SIX_HOURS)
        said.append(status())
        if relays:
            rows.update(process_after=DatabaseNow())  # the lease is over
            relays.pop().send_batch()

    monkeypatch.setattr(Broker, "before", staticmethod(slow))
    relays.pop().send_batch()
    sent = [message.data for message in Broker.got]
    assert sorted(sent) == [1, 1, 1, 2, 2, 2]
    assert group is None or sent == [1, 2] * 3  # without a group, there is no order
    assert ["! outbox messages waiting" in each for each in said] == [False, True, True]
    assert "Failed, to be retried: " in said[-1]
    assert [(row.state, row.attempts, row.error) for row in rows.all()] == [("done", 0, "")] * 2


def test_handler(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler with steps hangs, and its lease is renewed. Another process finds the message in
    progress each time: it says so until the handler has ended.
    """
    rows, stepping = InboxMessage.objects.using(using), Stepping.consumer._handlers["order.paid"]
    hangs, released = threading.Event(), threading.Event()

    def hang(event: Event, execution: Any) -> Any:
        hangs.set()
        assert released.wait(30)
        return stepping(event, execution)

    monkeypatch.setitem(Stepping.consumer._handlers, "order.paid", hang)
    deliver(Stepping)
    rows.update(received_at=DatabaseNow() - SIX_HOURS)

    def other() -> None:
        try:
            assert hangs.wait(30)
            assert "! inbox messages waiting" not in status()
            for _ in range(2):
                rows.update(process_after=DatabaseNow())  # the lease of its claim is over
                assert process_due() == {"pending": 1}
                assert "! inbox messages waiting" in status()
            assert "in progress" in rows.get().error
        finally:
            released.set()

    in_threads([process_due, other])
    row = rows.get()
    assert (row.state, row.attempts, row.error) == ("done", 1, "")
    assert Effect.objects.using(using).count() == 1
    assert "! inbox messages waiting" not in status()
