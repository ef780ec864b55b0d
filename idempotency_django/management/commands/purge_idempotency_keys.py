"""``manage.py purge_idempotency_keys``"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError

from ...errors import StoreUnavailable
from ...stores.purging import BATCH_SIZE, purge
from .. import stop_on_signals


class Command(BaseCommand):
    """Purges from a terminal or cron."""

    help = (
        "Deletes idempotency keys and messages (inbox and outbox) after their time to live and "
        "retention, in batches, oldest first. It can run during traffic, and you can stop it at "
        "any time."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--batch-size",
            type=int,
            default=BATCH_SIZE,
            metavar="ROWS",
            help=f"The most keys to delete in one transaction (default: {BATCH_SIZE}).",
        )

    def handle(self, *, batch_size: int, verbosity: int, **options: Any) -> None:
        if batch_size < 1:
            raise CommandError(f"--batch-size is {batch_size}. Pass 1 or more.")
        deleted, told = 0, "Purged {:,} keys and messages."
        try:
            with stop_on_signals() as stop:
                for batch in purge(batch_size=batch_size):
                    deleted += batch
                    if stop.is_set():
                        told += " It was stopped: the next purge deletes the rest."
                        break
        except (DatabaseError, StoreUnavailable) as error:
            raise CommandError(
                f"Cannot purge: {str(error).rstrip('.')}. Check that the database is running and "
                "migrated (manage.py migrate)."
            ) from error
        if verbosity:
            self.stdout.write(told.format(deleted))
