"""``manage.py purge_idempotency_keys``"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError

from ...errors import StoreUnavailable
from ...stores import Store, stores
from ...stores.purging import BATCH_SIZE, Purgeable, purge, registered_purges
from ..arguments import number
from ..stopping import stop_on_signals

_KEYS: Final = "idempotency keys"
_INTERRUPTED: Final = 130  # the exit code of shells after Ctrl-C


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
            type=number(int, str(BATCH_SIZE)),
            default=BATCH_SIZE,
            metavar="ROWS",
            help=f"The most keys to delete in one transaction (default: {BATCH_SIZE}).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        counts, started = Counter[str](), time.monotonic()
        everything: list[Store | Purgeable] = [*stores.all(), *registered_purges()]
        try:
            with stop_on_signals() as stop:
                for each in everything:
                    for deleted in purge([each], batch_size=options["batch_size"]):
                        counts[_named(each)] += deleted
                        if stop.is_set():
                            text = f"Interrupted. Purged {_listed(counts)} before that."
                            raise CommandError(text, returncode=_INTERRUPTED)
        except (DatabaseError, StoreUnavailable) as error:
            raise CommandError(
                f"Cannot purge: {str(error).rstrip('.')}. Check that the database is running and "
                "migrated (manage.py migrate)."
            ) from error
        if options["verbosity"]:
            took = time.monotonic() - started
            self.stdout.write(f"Purged {_listed(counts)} in {took:.1f} seconds.")


def _named(each: Store | Purgeable) -> str:
    return each.name if isinstance(each, Purgeable) else _KEYS


def _listed(counts: Mapping[str, int]) -> str:
    """The counts in words, of keys always: ``3 idempotency keys, 1 outbox message``."""
    return ", ".join(
        f"{count:,} {name.removesuffix('s') if count == 1 else name}"
        for name, count in {_KEYS: 0, **counts}.items()
        if count or name == _KEYS
    )
