"""A relay with nothing to send waits until it is woken up, told to stop, or its time is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from django.db import DatabaseError, connections

from idempotency_django.contrib.messaging.outbox import waking
from idempotency_django.contrib.messaging.outbox.waking import NotificationListener, wake_relays

pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__"), pytest.mark.driver]


@pytest.fixture
def stop() -> threading.Event:
    return threading.Event()


@pytest.fixture
def listener(using: str, stop: threading.Event) -> Iterator[NotificationListener]:
    if connections[using].vendor != "postgresql":
        pytest.skip("only PostgreSQL can wake up a relay")
    listener = NotificationListener(using, stop)
    yield listener
    listener.close()


def test_stopped(listener: NotificationListener, stop: threading.Event) -> None:
    """One that is told to stop waits no longer."""
    stop.set()
    listener.wait(3600)


def test_connection_lost(
    listener: NotificationListener, stop: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot listen any more waits as if there were nothing to hear."""
    asked = []

    def lost(seconds: float) -> bool:
        asked.append(seconds)
        stop.set()
        raise DatabaseError("server closed the connection unexpectedly")

    monkeypatch.setattr(listener, "_heard", lost)
    listener.wait(3600)
    assert len(asked) == 1


def test_woken(using: str, listener: NotificationListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that wakes the relays up is heard by one that listens."""
    assert listener._heard(0) is False  # it listens from here on
    monkeypatch.setattr(waking, "_last", {})
    wake_relays(using)
    listener.wait(60)
    assert listener._woken


def test_elsewhere(using: str) -> None:
    """On other databases, nothing is sent to wake up a relay."""
    if connections[using].vendor != "postgresql":
        wake_relays(using)
        assert connections[using].run_on_commit == []
