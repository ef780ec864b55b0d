"""Handlers that kill the process of the relay."""

from __future__ import annotations

import os
import signal
from typing import Any

from idempotency_django.contrib.messaging import Consumer
from tests.models import Effect

OUTBOX: Any = {
    "local": {
        "BACKEND": "local",
        "OPTIONS": {"consumers": ["tests.contrib.messaging.outbox.killing.deadly"]},
    },
    "after_commit": {"MAX_ATTEMPTS": 2},
}

deadly = Consumer("deadly", max_attempts=2)


@deadly.on("n")
def handle(event: Any, execution: Any) -> None:
    """Make an effect, and end the process where the event says so."""
    make(event.data)


def make(what: str) -> None:
    """Make an effect, and end the process where it says so."""
    Effect.objects.create(reference=what)
    if what == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
