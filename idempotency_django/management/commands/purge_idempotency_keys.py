"""``manage.py purge_idempotency_keys``"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError

from ...errors import StoreUnavailable
from ...stores import Store, stores
from ...stores.purging import BATCH_SIZE, Purgeable, purge, registered_purges
from ..arguments import duration, number
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
        parser.add_argument(
            "--max-seconds",
            type=number(float, "60"),
            metavar="SECONDS",
            help="Start no batch after this time, even if keys are left (default: no limit).",
        )
        parser.add_argument(
            "--older-than",
            type=duration,
            default=timedelta(0),
            metavar="DURATION",
            help="Keep records and messages that expired within this period: 7d, 12h, 30m, 90s.",
        )
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="Count what would be deleted, and delete nothing.",
        )
        parser.add_argument(
            "--store",
            metavar="ALIAS",
            help="Purge this store of IDEMPOTENCY['STORES'] only (default: all, and the messages).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["store"]
        try:
            chosen: list[Store] = stores.all() if alias is None else [stores[alias]]
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        everything: list[Store | Purgeable] = [each for each in chosen if not each.forgets_expired]
        everything += registered_purges() if alias is None else ()
        try:
            if options["dry_run"]:
                told = f"Would purge {self._counted(everything, options)}. Nothing was deleted."
            else:
                told = self._purged(everything, options)
        except (DatabaseError, StoreUnavailable) as error:
            raise CommandError(
                f"Cannot purge: {str(error).rstrip('.')}. Check that the database is running and "
                "migrated (manage.py migrate)."
            ) from error
        if not everything:
            aliases = ", ".join(repr(store.alias) for store in chosen)
            told = f"Nothing to purge: expired keys are deleted by the store itself ({aliases})."
        if options["verbosity"]:
            self.stdout.write(told)

    def _counted(self, everything: list[Store | Purgeable], options: dict[str, Any]) -> str:
        counts = Counter[str]()
        for each in everything:
            counts[_named(each)] += each.purgeable(options["older_than"])
        return _listed(counts)

    def _purged(self, everything: list[Store | Purgeable], options: dict[str, Any]) -> str:
        limit, counts, started = options["max_seconds"], Counter[str](), time.monotonic()
        with stop_on_signals() as stop:
            for each in everything:
                batches = purge(
                    [each],
                    older_than=options["older_than"],
                    batch_size=options["batch_size"],
                    max_seconds=limit and limit - (time.monotonic() - started),
                )
                for deleted in batches:
                    counts[_named(each)] += deleted
                    if stop.is_set():
                        text = f"Interrupted. Purged {_listed(counts)} before that."
                        raise CommandError(text, returncode=_INTERRUPTED)
        took = time.monotonic() - started
        told = f"Purged {_listed(counts)} in {took:.1f} seconds."
        if limit is not None and took >= limit:
            told += "\nThe time limit was reached, so keys may be left. Run the command again."
        return told


def _named(each: Store | Purgeable) -> str:
    return each.name if isinstance(each, Purgeable) else _KEYS


def _listed(counts: Mapping[str, int]) -> str:
    """The counts in words, of keys always: ``3 idempotency keys, 1 outbox message``."""
    return ", ".join(
        f"{count:,} {name.removesuffix('s') if count == 1 else name}"
        for name, count in {_KEYS: 0, **counts}.items()
        if count or name == _KEYS
    )
