"""A relay in a process of its own, whose handlers kill it."""

from __future__ import annotations

import os
import signal
from typing import Any

import django

if __name__ == "__main__":
    django.setup()

from idempotency_django.contrib.messaging import Consumer
from tests.models import Effect

OUTBOX: Any = {
    "local": {
        "BACKEND": "idempotency_django.contrib.messaging.LocalPublisher",
        "OPTIONS": {"consumers": ["tests.contrib.messaging.outbox.killing.deadly"]},
    },
    "after_commit": {"MAX_ATTEMPTS": 2},
}

deadly = Consumer("deadly", max_attempts=2)


@deadly.on("n")
def handle(event: Any, execution: Any) -> None:
    """Make an effect, and end the process, or raise, where the event says so."""
    make(event.data)


def make(what: str) -> None:
    """Make an effect, and end the process, or raise, where it says so."""
    Effect.objects.create(reference=what)
    if what == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "fails":
        raise ConnectionError("The warehouse does not respond.")


def main() -> None:
    """Send what is there."""
    from django.conf import settings

    from idempotency_django.contrib.messaging import Relay

    settings.IDEMPOTENCY = {"OUTBOX": OUTBOX}
    Relay().drain()


if __name__ == "__main__":
    main()
