"""What tests of several modules ask for."""

from __future__ import annotations

import logging
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


class _Unprotected(logging.Handler):
    """Keeps what is logged of protected views that answered without a claim."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, where it is of that kind."""
        if "is not protected" in str(record.msg):
            self.records.append(record)


@pytest.fixture(autouse=True)
def unprotected() -> Iterator[list[logging.LogRecord]]:
    """No test may pass in which a protected view answered without a claim."""
    handler = _Unprotected()
    logger = logging.getLogger("idempotency_django")
    logger.addHandler(handler)
    yield handler.records
    logger.removeHandler(handler)
    assert handler.records == []
