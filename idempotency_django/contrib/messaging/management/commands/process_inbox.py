"""``manage.py process_inbox``"""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from .....management import number, stop_on_signals
from ...inbox.processing import BATCH, POLL, process_due, run_inbox, warn_of_unhandled
from ...tables import refuse_unmigrated


class Command(BaseCommand):
    """Processes the inbox from a terminal, cron or a supervisor."""

    help = (
        "Handles the messages of the webhook inbox as they become due. On SIGTERM, it finishes "
        "the current message and exits. Several processes can run."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--once", action="store_true", help="Exit as soon as nothing is due, for cron."
        )
        parser.add_argument(
            "--source",
            action="append",
            default=[],
            metavar="SOURCE",
            help="Handle only messages of this source. Can be repeated.",
        )
        parser.add_argument(
            "--batch",
            type=number(int, str(BATCH)),
            default=BATCH,
            metavar="MESSAGES",
            help=f"How many messages to claim at once (default: {BATCH}).",
        )
        parser.add_argument(
            "--poll",
            type=number(float, "1"),
            default=POLL.total_seconds(),
            metavar="SECONDS",
            help=f"The polling interval when nothing is due (default: {POLL.total_seconds():g}).",
        )
        parser.add_argument(
            "--health",
            metavar="FILE",
            default="",
            help="A file that is touched every second, for a liveness probe.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        chosen = {"sources": options["source"], "batch": options["batch"]}
        try:
            refuse_unmigrated()
            with stop_on_signals() as stop:
                if options["once"]:
                    warn_of_unhandled()
                    self._say(process_due(**chosen, stop=stop), options["verbosity"])
                else:
                    poll = timedelta(seconds=options["poll"])
                    run_inbox(stop, **chosen, poll=poll, health=options["health"])
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error

    def _say(self, tally: Counter[str], verbosity: int) -> None:
        if verbosity:
            later = {"pending": "failed or waiting, to be retried"}
            counts = [f"{number} {later.get(each, each)}" for each, number in sorted(tally.items())]
            self.stdout.write(f"Messages: {', '.join(counts) or 'none was due'}.")
