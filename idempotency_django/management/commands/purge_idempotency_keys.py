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
_ERASE_LINE: Final = "\r\x1b[K"
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
        messages = registered_purges() if alias is None else []
        self.quiet = options["verbosity"] == 0
        if not messages and all(store.forgets_expired for store in chosen):
            self._say(_nothing_to_purge(chosen))
            return
        try:
            if options["dry_run"]:
                self._count([*chosen, *messages], options["older_than"])
            else:
                self._purge([*chosen, *messages], options)
        except (DatabaseError, StoreUnavailable) as error:
            raise CommandError(
                f"Cannot purge: {str(error).rstrip('.')}. Check that the database is running and "
                "migrated (manage.py migrate)."
            ) from error

    def _count(self, everything: list[Store | Purgeable], older_than: timedelta) -> None:
        counts = Counter[str]()
        for each in everything:
            counts[_named(each)] += each.purgeable(older_than)
        self._say(f"Would purge {_listed(counts)}. Nothing was deleted.")

    def _purge(self, everything: list[Store | Purgeable], options: dict[str, Any]) -> None:
        limit, counts, started = options["max_seconds"], Counter[str](), time.monotonic()
        with stop_on_signals() as stop:
            for each in everything:
                left = limit and limit - (time.monotonic() - started)
                batches = purge(
                    [each],
                    older_than=options["older_than"],
                    batch_size=options["batch_size"],
                    max_seconds=left,
                )
                for deleted in batches:
                    counts[_named(each)] += deleted
                    if self.stdout.isatty() and not self.quiet:
                        so_far = f"{_ERASE_LINE}Purged {_listed(counts)} so far …"
                        self.stdout.write(so_far, ending="")
                        self.stdout.flush()
                    if stop.is_set():
                        raise CommandError(
                            f"Interrupted. Purged {_listed(counts)} before that.",
                            returncode=_INTERRUPTED,
                        )
        took = time.monotonic() - started
        self._say(f"Purged {_listed(counts)} in {took:.1f} seconds.")
        if limit is not None and took >= limit:
            self._say("The time limit was reached, so keys may be left. Run the command again.")

    def _say(self, text: str) -> None:
        if not self.quiet:
            self.stdout.write(f"{_ERASE_LINE}{text}" if self.stdout.isatty() else text)


def _nothing_to_purge(chosen: list[Store]) -> str:
    aliases = ", ".join(repr(store.alias) for store in chosen)
    if len(chosen) == 1:
        which = f"the store {aliases} deletes its keys when they expire"
    else:
        which = f"the stores {aliases} delete their keys by themselves when they expire"
    return f"Nothing to purge: {which}."


def _named(each: Store | Purgeable) -> str:
    return each.name if isinstance(each, Purgeable) else _KEYS


def _listed(counts: Mapping[str, int]) -> str:
    """The counts in words, of keys always: ``3 idempotency keys, 1 outbox message``."""
    return ", ".join(
        f"{count:,} {name.removesuffix('s') if count == 1 else name}"
        for name, count in {_KEYS: 0, **counts}.items()
        if count or name == _KEYS
    )
