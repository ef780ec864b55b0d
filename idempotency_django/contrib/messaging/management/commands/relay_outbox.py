"""``manage.py relay_outbox``"""

from __future__ import annotations

from argparse import ArgumentParser
from contextlib import closing
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand

from .....management import number, stop_on_signals
from ...outbox.relay import POLL, Relay, run_relay


class Command(BaseCommand):
    """Relays from a terminal, cron or a supervisor."""

    help = (
        "Sends the messages of the outbox as they are committed. On SIGTERM, it finishes the "
        "current batch and exits. Several processes can run."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--once", action="store_true", help="Exit as soon as nothing is due, for cron."
        )
        parser.add_argument(
            "--poll",
            type=number(float),
            default=POLL.total_seconds(),
            metavar="SECONDS",
            help="The polling interval when nothing is due (default: 1).",
        )
        parser.add_argument(
            "--health",
            metavar="FILE",
            default="",
            help="A file that is touched every second, for a liveness probe.",
        )

    def handle(self, *, once: bool, **options: Any) -> None:
        say = self.stdout.write if options["verbosity"] else str
        with closing(Relay()) as relay, stop_on_signals() as stop:
            if once:
                relay.drain(stop)
                counts = [f"{number} {each}" for each, number in sorted(relay.tally.items())]
                say(f"Messages: {', '.join(counts) or 'none was due'}.")
            else:
                say("The relay runs. It ends on SIGTERM.")
                poll = timedelta(seconds=options["poll"])
                run_relay(stop, relay, poll=poll, health=options["health"])
