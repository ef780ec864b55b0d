"""``manage.py process_inbox``"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from .....management import stop_on_signals
from ...inbox.processing import process_due, run_inbox


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
            "--health",
            metavar="FILE",
            default="",
            help="A file that is touched every second, for a liveness probe.",
        )

    def handle(self, *, once: bool, health: str, **options: Any) -> None:
        try:
            with stop_on_signals() as stop:
                if not once:
                    return run_inbox(stop, health=health)
                tally = process_due(stop=stop)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        if options["verbosity"]:
            later = {"pending": "failed or waiting, to be retried"}
            counts = [f"{number} {later.get(each, each)}" for each, number in sorted(tally.items())]
            self.stdout.write(f"Messages: {', '.join(counts) or 'none was due'}.")
        return None
