"""``manage.py run_messaging``"""

from __future__ import annotations

import threading
from argparse import ArgumentParser
from collections import Counter
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from .....management import stop_on_signals
from .....stores import purge
from ...inbox import BATCH, process_batch, process_due, receivers
from ...loops import Part, run
from ...outbox.relay import Relay

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
            "--once",
            action="store_true",
            help="Exit as soon as nothing is due, for cron. It does not purge.",
        )
        parser.add_argument(
            "--health",
            metavar="FILE",
            default="",
            help="A file that is touched every second, for a liveness probe.",
        )

    def handle(self, *, once: bool, health: str, verbosity: int, **options: Any) -> None:
        say = self.stdout.write if verbosity else str
        try:
            receivers()  # where the URLs cannot be imported, it ends
            with closing(Relay()) as relay, stop_on_signals() as stop:
                if once:
                    handled = process_due(stop=stop)  # first: handlers may publish
                    relay.drain(stop)
                    say(_outcome(relay.tally + handled))
                    return
                say("Messaging runs: relay, inbox and purge. It ends on SIGTERM.")
                inbox = partial(process_batch, BATCH, stop, Counter())
                parts = [
                    Part("relay", relay.work),
                    Part("inbox", inbox),
                    Part("purge", partial(_purge, stop), PURGE_INTERVAL),
                ]
                run(parts, stop, health=health)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error


def _purge(stop: threading.Event) -> None:
    """Purge every store and the tables of messaging."""
    for _ in purge():
        if stop.is_set():
            break


def _outcome(tally: Counter[str]) -> str:
    """How many messages are in which state now, in words."""
    later = {"pending": "failed or waiting, to be retried"}
    counts = [f"{number} {later.get(each, each)}" for each, number in sorted(tally.items())]
    return f"Messages: {', '.join(counts) or 'none was due'}."
