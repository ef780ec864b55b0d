"""The consumer of the processes that the tests start, and kill."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from idempotency_django.backoff import Backoff
from idempotency_django.contrib.messaging import Consumer, Event
from idempotency_django.contrib.messaging.brokers import loop
from idempotency_django.policy import Policy
from tests.models import Effect

WITHIN, AFTER = "within the handler", "after the commit"
ALWAYS = "at each attempt"

loop.BACKOFF = Backoff(timedelta(seconds=0.05), timedelta(seconds=1))  # type: ignore[misc]  # nobody waits here for what recovers
loop.RECONNECT = timedelta(seconds=0.05)  # type: ignore[misc]


class Mortal(Consumer):
    """A consumer whose process may end between the commit and the acknowledgement."""

    def handle(self, event: Event, **arguments: Any) -> Any:
        outcome = super().handle(event, **arguments)
        strike(event, AFTER)
        return outcome


most = int(os.environ.get("MAX_ATTEMPTS", "5"))
billing = Mortal("billing", policy=Policy(lease=timedelta(seconds=2)), max_attempts=most)


@billing.on("order.paid")
def book(event: Event, execution: Any) -> None:
    """Make an effect, and fail as the event says."""
    folder = Path(event.data["folder"])
    with (folder / "starts").open("a") as starts:
        starts.write(f"{event.id} {os.getpid()}\n")
    Effect.objects.create(reference=event.id)
    if event.data.get("poison"):
        raise ValueError("poison")
    strike(event, WITHIN)
    wanted = folder / event.data.get("until", "")
    if started(folder).count(event.id) == 1:  # in the first process only
        while not wanted.exists():
            time.sleep(0.01)


def started(folder: Path) -> list[str]:
    """The events that handlers were called with, in order."""
    path = folder / "starts"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def strike(event: Event, moment: str) -> None:
    """End here as if the power had failed, the first time or each time, if the event says so."""
    folder, wanted = Path(event.data["folder"]), event.data.get("strike")
    is_first = wanted == moment and started(folder).count(event.id) == 1
    if wanted == ALWAYS or (is_first and not (folder / f"struck-{event.id}").exists()):
        (folder / f"struck-{event.id}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
