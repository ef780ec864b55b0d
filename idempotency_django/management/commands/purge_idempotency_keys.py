"""``manage.py purge_idempotency_keys``"""

from __future__ import annotations

import re
import signal
import threading
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError

from ...errors import StoreUnavailable
from ...stores import Store, stores
from ...stores.purging import BATCH_SIZE, Purgeable, purge, registered

_UNITS: Final = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
_CENTURY: Final = timedelta(days=36_500)  # databases know no dates from far before our era
_ERASE_LINE: Final = "\r\x1b[K"
_INTERRUPTED: Final = 130  # what shells answer for a process that Ctrl-C has ended


def duration(text: str) -> timedelta:
    """A duration in words of the command line: ``7d``, ``12h``, ``30m``, ``90s``."""
    match = re.fullmatch(r"([0-9]{1,9})([dhms])", text)
    length = timedelta(**{_UNITS[match[2]]: int(match[1])}) if match else None
    if length is None or length > _CENTURY:
        raise ArgumentTypeError(
            f"{text!r} is not a duration of up to a century. Write a number and its unit, "
            "without a space: 7d, 12h, 30m or 90s."
        )
    return length


def batch_size(text: str) -> int:
    """How many records go in one batch."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} must be a whole number, 1 or more, such as 5000.")
    return int(text)


def seconds(text: str) -> float:
    """How long the command may take."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) or float(text) <= 0:
        raise ArgumentTypeError(f"{text!r} must be a number of seconds, more than 0, such as 60.")
    return float(text)


class Command(BaseCommand):
    """Purges from a terminal or cron."""

    help = (
        "Deletes the idempotency keys that are past their time to live and retention, and the "
        "messages of inbox and outbox that are done with, in batches, oldest first. It can run "
        "during traffic and be stopped at any time."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--batch-size",
            type=batch_size,
            default=BATCH_SIZE,
            metavar="ROWS",
            help=f"The most keys to delete in one transaction (default: {BATCH_SIZE}).",
        )
        parser.add_argument(
            "--max-seconds",
            type=seconds,
            metavar="SECONDS",
            help="Begin no batch after this time, even if keys are left (default: no limit).",
        )
        parser.add_argument(
            "--older-than",
            type=duration,
            default=timedelta(0),
            metavar="DURATION",
            help="Keep what became purgeable more recently than this: 7d, 12h, 30m, 90s.",
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
        self.quiet = options["verbosity"] == 0
        chosen = self._stores(options["store"])
        others = registered() if options["store"] is None else []
        if not others and all(store.forgets_expired for store in chosen):
            self._say(_nothing_to_purge([repr(store.alias) for store in chosen]))
            return
        try:
            self._purge_or_count(chosen, others, options)
        except (DatabaseError, StoreUnavailable) as error:
            raise CommandError(
                f"Cannot purge: {str(error).rstrip('.')}. Is the database running, and are its "
                "tables migrated (manage.py migrate)?"
            ) from error

    def _purge_or_count(
        self, chosen: list[Store], others: list[Purgeable], options: dict[str, Any]
    ) -> None:
        if options["dry_run"]:
            count = sum(store.purgeable(options["older_than"]) for store in chosen)
            more = {each.name: each.purgeable(options["older_than"]) for each in others}
            self._say(f"Would purge {_listed(count, more)}. Nothing was deleted.")
        else:
            self._purge(chosen, others, options)

    def _stores(self, alias: str | None) -> list[Store]:
        try:
            return stores.all() if alias is None else [stores[alias]]
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error

    def _purge(self, chosen: list[Store], more: list[Purgeable], options: dict[str, Any]) -> None:
        names = ("older_than", "batch_size", "max_seconds")
        others, total, purged = Counter[str](), 0, _keys(0)
        counted = [_counted(each, others) for each in more]
        batches = purge([*chosen, *counted], **{name: options[name] for name in names})
        started = time.monotonic()
        with _interrupts() as interrupted:
            for deleted in batches:
                total += deleted
                purged = _listed(total - sum(others.values()), others)
                self._show_progress(purged)
                if interrupted.is_set():
                    raise CommandError(
                        f"Interrupted after {purged} had been purged.", returncode=_INTERRUPTED
                    )
        took = time.monotonic() - started
        self._say(f"Purged {purged} in {took:.1f} seconds.")
        if options["max_seconds"] is not None and took >= options["max_seconds"]:
            self._say("The time is up, and some keys may be left. Run the command again.")

    def _show_progress(self, purged: str) -> None:
        if self.stdout.isatty() and not self.quiet:
            self.stdout.write(f"{_ERASE_LINE}Purged {purged} so far …", ending="")
            self.stdout.flush()

    def _say(self, text: str) -> None:
        if not self.quiet:
            self.stdout.write(f"{_ERASE_LINE}{text}" if self.stdout.isatty() else text)


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Have Ctrl-C set the event instead of tearing a batch apart; a second Ctrl-C does that.

    What a driver makes of an interrupt within a statement is anything but a clean end.
    """
    interrupted, interrupt = threading.Event(), signal.default_int_handler

    def note(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, interrupt)

    # Not where Ctrl-C is ignored (in the background), or somebody else's business (in a thread).
    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGINT) is interrupt
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        if ours:
            signal.signal(signal.SIGINT, interrupt)


def _nothing_to_purge(aliases: list[str]) -> str:
    if len(aliases) == 1:
        which = f"the store {aliases[0]} deletes its keys by itself when they expire"
    else:
        which = f"the stores {', '.join(aliases)} delete their keys by themselves when they expire"
    return f"Nothing to purge: {which}."


def _keys(count: int) -> str:
    return f"{count:,} idempotency key{'' if count == 1 else 's'}"


def _listed(keys: int, others: Mapping[str, int]) -> str:
    more = [f"{count:,} {name}" for name, count in others.items() if count]
    return ", ".join([_keys(keys), *more])


def _counted(each: Purgeable, counts: Counter[str]) -> Purgeable:
    """The same, and what it deletes is counted."""

    def purge(older_than: timedelta, limit: int) -> int:
        deleted = each.purge(older_than, limit)
        counts[each.name] += deleted
        return deleted

    return replace(each, purge=purge)
