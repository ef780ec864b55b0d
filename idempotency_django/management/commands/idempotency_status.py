"""``manage.py idempotency_status``"""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import timedelta
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError

from ...errors import StoreUnavailable
from .. import Finding, findings

_MAX_MINUTES: Final = 15
_TOO_MANY: Final = 1_000_000
_UNKNOWN: Final = 2  # the exit code where that cannot be found out
_ROW: Final = "{} {:<25} {:<15} {:>7}  {:>6}"
_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


class Command(BaseCommand):
    """Reports overdue keys and messages, for monitoring."""

    help = (
        "Lists keys and messages (outbox and inbox) that wait for a process or an operator. Exits "
        "with 1 if something waits for too long, and with 2 if a check fails. With -v 0 it prints "
        "problems only."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--max-minutes",
            type=int,
            default=_MAX_MINUTES,
            metavar="MINUTES",
            help="How long messages can be due and keys interrupted before it is a problem "
            f"(default: {_MAX_MINUTES}).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        minutes = options["max_minutes"]
        if not 0 < minutes < _TOO_MANY:
            raise CommandError(f"--max-minutes is {minutes}. Pass 1 to {_TOO_MANY - 1:,}.")
        try:
            found = list(findings(timedelta(minutes=minutes)))
        except (ImproperlyConfigured, DatabaseError, StoreUnavailable) as error:
            check = "Check the settings, and that the database is migrated."
            raise CommandError(
                f"Nothing is known: {error}. {check}", returncode=_UNKNOWN
            ) from error
        problems = [each for each in found if each.problem]
        shown = found if options["verbosity"] else problems
        if shown:
            self.stdout.write(_ROW.format(" ", "What", "Where", "Count", "Oldest"))
        for each in shown:
            self.stdout.write(_line(each))
        if problems:
            raise CommandError(f"{len(problems)} of {len(found)} lines need attention.")


def _line(finding: Finding) -> str:
    """A finding, and below it what is wrong."""
    count = f"{finding.count:,}{'+' if finding.is_bounded else ''}"
    oldest = "–" if finding.oldest is None else _length(finding.oldest)
    mark = "!" if finding.problem else " "
    line = _ROW.format(mark, finding.what, finding.where, count, oldest)
    return f"{line}\n    {finding.problem}" if finding.problem else line


def _length(age: timedelta) -> str:
    """A duration in its largest unit."""
    seconds = max(0, int(age.total_seconds()))
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{seconds // size} {unit}"
