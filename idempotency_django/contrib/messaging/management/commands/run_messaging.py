"""``manage.py run_messaging``"""

from __future__ import annotations

import threading
from argparse import ArgumentParser
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from .....management import stop_on_signals
from .....stores import purge
from ...inbox.processing import run_inbox
from ...loops import repeat
from ...outbox.relay import run_relay

PURGE_INTERVAL: Final = timedelta(hours=1)


class Command(BaseCommand):
    """Runs all that messaging needs in one process."""

    help = (
        "Sends the messages of the outbox, handles the messages of the webhook inbox, and purges "
        "every hour. On SIGTERM, it finishes the current work and exits with 0. If one part ends "
        "with an error, it stops the others and exits with 1. Several processes can run."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--health",
            metavar="FILE",
            default="",
            help="A file that is touched every second, for a liveness probe.",
        )

    def handle(self, *, health: str, verbosity: int, **options: Any) -> None:
        if verbosity:
            self.stdout.write("Messaging runs: relay, inbox and purge. It ends on SIGTERM.")
        try:
            with stop_on_signals() as stop:
                run(stop, health)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error


def run(stop: threading.Event, health: str = "") -> None:
    """Send the outbox, handle the inbox and purge, each in a thread, until ``stop`` is set.

    Each part finishes what it has in hand. If one ends with an error, the others are stopped, and
    the error is raised, so that a supervisor can start the process again.
    """
    errors: list[BaseException] = []

    def begin(part: Callable[[threading.Event], None]) -> None:
        try:
            part(stop)
        except BaseException as error:  # noqa: BLE001  # it is raised below
            errors.append(error)
        finally:
            stop.set()
            connections.close_all()

    relay, inbox = partial(run_relay, health=health), partial(run_inbox, health=health)
    parts = [
        threading.Thread(target=begin, args=[x], daemon=True) for x in (relay, inbox, run_purge)
    ]
    for part in parts:
        part.start()
    for part in parts:
        part.join()
    for error in errors:
        raise error


def run_purge(stop: threading.Event) -> None:
    """Purge every store and the tables of messaging every hour, until ``stop`` is set."""

    def work() -> None:
        for _ in purge():
            if stop.is_set():
                break

    repeat(work, stop, what="purge", poll=PURGE_INTERVAL)
