from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from idempotency_django.backoff import Backoff
from idempotency_django.contrib.messaging.brokers import loop
from tests.contrib.messaging.brokers import Broker
from tests.contrib.messaging.conftest import CONSUMED


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for long."""
    moment = timedelta(seconds=0.02)
    monkeypatch.setattr(loop, "BACKOFF", Backoff(moment, moment))
    monkeypatch.setattr(loop, "RECONNECT", moment)


@pytest.fixture(params=CONSUMED)
def broker(request: pytest.FixtureRequest, place: Callable[..., Broker]) -> Broker:
    """A place at each of the brokers."""
    return place(request.param)
