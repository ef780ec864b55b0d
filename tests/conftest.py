"""What tests of several modules ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from idempotency_django import signals

SIGNALS = "claimed completed replayed conflicted mismatched failed released lost".split()


@pytest.fixture
def sent() -> Iterator[list[str]]:
    """The names of the signals that were sent, in order."""
    names: list[str] = []
    receivers = []
    for name in SIGNALS:

        def receive(name: str = name, **_: Any) -> None:
            names.append(name)

        receivers.append((getattr(signals, name), receive))
        getattr(signals, name).connect(receive)
    yield names
    for signal, receive in receivers:
        signal.disconnect(receive)
