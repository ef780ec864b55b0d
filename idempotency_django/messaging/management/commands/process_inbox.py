"""``manage.py process_inbox``"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections import Counter
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from ...inbox.processing import BATCH, POLL, process_due, run
from ...stopping import stop_on_signals
from ...tables import refuse_unmigrated


def count(text: str) -> int:
    """How many messages are claimed at once."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} must be a whole number, 1 or more, such as {BATCH}.")
    return int(text)


class Command(BaseCommand):
    """Processes the inbox from a terminal, cron or a supervisor."""

    help = (
        "Handles the messages of the webhook inbox, as they become due, until it gets SIGTERM. The "
        "message in hand is finished then. It can run in several processes."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--once", action="store_true", help="End as soon as nothing is due, for cron."
        )
        parser.add_argument(
            "--source",
            action="append",
            default=[],
            metavar="SOURCE",
            help="Handle messages of this source only; may be given several times.",
        )
        parser.add_argument(
            "--batch",
            type=count,
            default=BATCH,
            metavar="MESSAGES",
            help=f"How many messages are claimed at once (default: {BATCH}).",
        )
        parser.add_argument(
            "--poll",
            type=float,
            default=POLL.total_seconds(),
            metavar="SECONDS",
            help=f"How long to wait when nothing is due (default: {POLL.total_seconds():g}).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            refuse_unmigrated()
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        chosen = {"sources": options["source"], "batch": options["batch"]}
        with stop_on_signals() as stop:
            if options["once"]:
                self._say(process_due(**chosen, stop=stop), options["verbosity"])
            else:
                run(stop, **chosen, poll=timedelta(seconds=options["poll"]))

    def _say(self, tally: Counter[str], verbosity: int) -> None:
        if verbosity:
            told = ", ".join(f"{number} {state}" for state, number in sorted(tally.items()))
            self.stdout.write(f"Messages: {told or 'none was due'}.")
