"""All that messaging needs to run, in one process: the relay, the inbox and the purge."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Final

from django.db import connections

from ...stores import purge, registered_purges, stores
from .databases import reason
from .inbox.processing import run_inbox
from .loops import repeat
from .outbox.relay import POLL, run_relay

logger = logging.getLogger("idempotency_django")

PURGE_INTERVAL: Final = timedelta(hours=1)


class PartEnded(RuntimeError):
    """A part of messaging has ended with an error, so all of them were stopped."""


def run_messaging(
    stop: threading.Event,
    *,
    poll: timedelta = POLL,
    purge_every: timedelta = PURGE_INTERVAL,
    health: str = "",
) -> None:
    """Send the outbox, handle the inbox and purge, each in a thread, until ``stop`` is set.

    Each part finishes what it has in hand. If one ends with an error, the others are stopped, so
    that a supervisor can start the process again.

    Args:
        stop: when to stop.
        poll: how long relay and inbox wait when nothing is due.
        purge_every: how long the purge waits between two runs.
        health: a file that is touched every second, unless a handler hangs; empty: none.

    Raises:
        PartEnded: a part has ended with an error; the text says which and why.
    """
    parts: dict[str, Callable[[threading.Event], None]] = {
        "relay": partial(run_relay, poll=poll, health=health),
        "inbox": partial(run_inbox, poll=poll, health=health),
        "purge": partial(run_purge, poll=purge_every),
    }
    errors: dict[str, BaseException] = {}

    def run(name: str, part: Callable[[threading.Event], None]) -> None:
        try:
            part(stop)
        except BaseException as error:  # a part that has ended must be reported
            logger.critical("The %s ended with an error. All parts stop.", name, exc_info=True)
            errors[name] = error
        finally:
            stop.set()
            connections.close_all()

    threads = [
        threading.Thread(target=run, args=part, name=part[0], daemon=True) for part in parts.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, error in errors.items():
        raise PartEnded(
            f"The {name} ended with an error, so all parts were stopped: {reason(error)}"
        ) from error


def run_purge(stop: threading.Event, *, poll: timedelta = PURGE_INTERVAL) -> None:
    """Purge every store and the tables of messaging again and again, until ``stop`` is set.

    Args:
        stop: when to stop; the batch in hand is finished.
        poll: how long to wait between two runs.
    """

    def work() -> None:
        for _ in purge([*stores.all(), *registered_purges()]):
            if stop.is_set():
                break

    repeat(work, stop, what="purge", poll=poll)
