"""A relay with nothing to send waits until it is woken up, told to stop, or its time is over."""

from __future__ import annotations

import threading

import pytest
from django.db import DatabaseError

from idempotency_django.messaging.outbox import waking
from idempotency_django.messaging.outbox.waking import NotificationListener, wake_relays

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


@pytest.fixture
def stop() -> threading.Event:
    return threading.Event()


def test_stopped(using: str, stop: threading.Event) -> None:
    """One that is told to stop waits no longer, on any database."""
    listener = NotificationListener(using)
    stop.set()
    listener.wait(3600, stop)
    listener.close()


def test_connection_lost(
    using: str, stop: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot listen any more waits as if there were nothing to hear."""
    listener, asked = NotificationListener(using), []

    def lost(seconds: float) -> bool:
        asked.append(seconds)
        stop.set()
        raise DatabaseError("server closed the connection unexpectedly")

    monkeypatch.setattr(listener, "_heard", lost)
    if listener._connection.vendor != "postgresql":
        stop.set()
    listener.wait(3600, stop)
    assert len(asked) == (listener._connection.vendor == "postgresql")
    listener.close()


def test_woken(using: str, stop: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that wakes the relays up is heard by one that listens; elsewhere nothing is sent."""
    listener = NotificationListener(using)
    if listener._connection.vendor != "postgresql":
        wake_relays(using)
        listener.close()
        return
    assert listener._heard(0) is False  # it listens from here on
    monkeypatch.setattr(waking, "_last", {})
    wake_relays(using)
    listener.wait(60, stop)
    assert listener._woken
    listener.close()
