"""``manage.py idempotency_status``"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError

from ...errors import StoreUnavailable
from ..arguments import duration
from ..health import Finding, Limits, findings

_MAX_AGE: Final = "15m"
_PURGE_AGE: Final = "3d"
_UNKNOWN: Final = 2  # the exit code where that cannot be found out
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
            "--max-age",
            type=duration,
            default=_MAX_AGE,
            metavar="DURATION",
            help="How long messages can be due and keys interrupted before it is a problem: 7d, "
            f"12h, 30m, 90s (default: {_MAX_AGE}).",
        )
        parser.add_argument(
            "--purge-age",
            type=duration,
            default=_PURGE_AGE,
            metavar="DURATION",
            help=f"How late a purge can be before it is a problem (default: {_PURGE_AGE}).",
        )
        parser.add_argument(
            "--format",
            choices=["text", "json"],
            default="text",
            help="The output format: text, or one JSON object (default: text).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        limits = Limits(options["max_age"], options["purge_age"])
        try:
            found = list(findings(limits))
        except (ImproperlyConfigured, DatabaseError, StoreUnavailable) as error:
            text = str(error)
            if not isinstance(error, ImproperlyConfigured):
                text = f"The query failed: {text}. Check that the database is running and migrated."
            if options["format"] == "json":
                self.stdout.write(json.dumps({"ok": False, "error": text}, ensure_ascii=False))
            raise CommandError(text, returncode=_UNKNOWN) from error
        problems = [each for each in found if each.problem]
        shown = found if options["verbosity"] else problems
        if options["format"] == "json":
            self.stdout.write(_as_json(found, limits))
        elif shown:
            self.stdout.write("\n".join(_table(shown)))
        if problems:
            raise CommandError(f"{len(problems)} of {len(found)} lines need attention.")


def _table(shown: list[Finding]) -> Iterator[str]:
    rows = [("", "What", "Where", "Count", "Oldest")]
    rows += [
        ("!" if each.problem else "", each.what, each.where, _count(each), _length(each.oldest))
        for each in shown
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(5)]
    for row, each in zip(rows, [None, *shown], strict=True):
        mark, what, where, count, oldest = row
        yield (
            f"{mark:1} {what:<{widths[1]}}  {where:<{widths[2]}}  {count:>{widths[3]}}  "
            f"{oldest:>{widths[4]}}"
        ).rstrip()
        if each is not None and each.problem:
            yield f"    {each.problem}"


def _count(finding: Finding) -> str:
    return f"{finding.count:,}{'+' if finding.is_bounded else ''}"


def _length(age: timedelta | None) -> str:
    """A duration in its largest unit."""
    if age is None:
        return "–"
    seconds = max(0, int(age.total_seconds()))
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{seconds // size} {unit}"


def _as_json(found: list[Finding], limits: Limits) -> str:
    document = {
        "ok": not any(each.problem for each in found),
        "max_age": limits.max_age.total_seconds(),
        "purge_age": limits.purge_age.total_seconds(),
        "findings": [
            {
                "what": each.what,
                "where": each.where,
                "count": each.count,
                "at_least": each.is_bounded,
                "oldest": None if each.oldest is None else each.oldest.total_seconds(),
                "problem": each.problem,
            }
            for each in found
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)
