"""``manage.py run_messaging``"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from .....management import stop_on_signals
from ...running import run_messaging


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
                run_messaging(stop, health=health)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
