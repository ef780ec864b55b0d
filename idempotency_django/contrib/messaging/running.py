"""All that messaging needs to run, in one process: the relay, the inbox and the purge."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Final

from django.db import connections

from ...stores import purge, registered_purges, stores
from .inbox.processing import run_inbox
from .loops import repeat
from .outbox.relay import POLL, run_relay

PURGE_INTERVAL: Final = timedelta(hours=1)


def run_messaging(stop: threading.Event, *, poll: timedelta = POLL, health: str = "") -> None:
    """Send the outbox, handle the inbox and purge, each in a thread, until ``stop`` is set.

    Each part finishes what it has in hand. If one ends with an error, the others are stopped, and
    the error is raised, so that a supervisor can start the process again.

    Args:
        stop: when to stop.
        poll: how long relay and inbox wait when nothing is due.
        health: a file that is touched every second, unless a handler hangs; empty: none.
    """
    errors: list[BaseException] = []

    def run(part: Callable[[threading.Event], None]) -> None:
        try:
            part(stop)
        except BaseException as error:  # noqa: BLE001  # it is raised below
            errors.append(error)
        finally:
            stop.set()
            connections.close_all()

    parts: list[Callable[[threading.Event], None]] = [
        partial(run_relay, poll=poll, health=health),
        partial(run_inbox, poll=poll, health=health),
        run_purge,
    ]
    threads = [threading.Thread(target=run, args=[part], daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


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
