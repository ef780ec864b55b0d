"""A consumer of what is published, and of what was retried."""

from __future__ import annotations

import time
from pathlib import Path

from idempotency_django.contrib.messaging import Consumer, Event
from tests.models import Effect

billing = Consumer("running")


@billing.on("order.paid")
def book(event: Event) -> None:
    """One effect for each event; it says that it has begun, and may have to wait."""
    Effect.objects.create(reference=event.data["order"])
    if "folder" in event.data:
        folder = Path(event.data["folder"])
        (folder / "begun").touch()
        while not (folder / "go").exists():
            time.sleep(0.02)
