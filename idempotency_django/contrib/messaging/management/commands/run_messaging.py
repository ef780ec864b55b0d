"""``manage.py run_messaging``"""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from .....management import number, stop_on_signals
from ...outbox.relay import POLL
from ...running import PURGE_INTERVAL, PartEnded, run_messaging
from ...tables import refuse_unmigrated


class Command(BaseCommand):
    """Runs all that messaging needs in one process."""

    help = (
        "Sends the messages of the outbox, handles the messages of the webhook inbox, and purges. "
        "On SIGTERM, it finishes the current work and exits with 0. If one part ends with an "
        "error, it stops the others and exits with 1. Several processes can run."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--poll",
            type=number(float, "1"),
            default=POLL.total_seconds(),
            metavar="SECONDS",
            help="The polling interval when nothing is due (default: 1).",
        )
        parser.add_argument(
            "--purge-every",
            type=number(float, "3600"),
            default=PURGE_INTERVAL.total_seconds(),
            metavar="SECONDS",
            help="The time between two purges (default: 3600).",
        )
        parser.add_argument(
            "--health",
            metavar="FILE",
            default="",
            help="A file that is touched every second, for a liveness probe.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["verbosity"]:
            self.stdout.write("Messaging runs: relay, inbox and purge. It ends on SIGTERM.")
        try:
            refuse_unmigrated()
            with stop_on_signals() as stop:
                run_messaging(
                    stop,
                    poll=timedelta(seconds=options["poll"]),
                    health=options["health"],
                    purge_every=timedelta(seconds=options["purge_every"]),
                )
        except (ImproperlyConfigured, PartEnded) as error:
            raise CommandError(str(error)) from error
