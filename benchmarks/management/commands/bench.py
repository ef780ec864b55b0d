"""Measures everything and writes the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from django.core.management import BaseCommand, CommandParser, call_command

from benchmarks import growth, inprocess, overhttp, plain
from benchmarks.report import DOCUMENT, Section, page

PARTS: Final[dict[str, tuple[Callable[..., Section], dict[str, int], dict[str, int]]]] = {
    "in-process": (
        inprocess.measure,
        {"rounds": 12, "requests": 200},
        {"rounds": 3, "requests": 50},
    ),
    "plain": (
        plain.measure,
        {"rounds": 12, "calls": 200, "races": 5, "owners": 5},
        {"rounds": 3, "calls": 50, "races": 1, "owners": 1},
    ),
    "over-http": (
        overhttp.measure,
        {"rounds": 12, "requests": 400, "races": 5},
        {"rounds": 2, "requests": 100, "races": 1},
    ),
    "growth": (
        growth.measure,
        {"rows": 2_000_000, "expired": 1_000_000, "rounds": 12, "requests": 200},
        {"rows": 50_000, "expired": 50_000, "rounds": 3, "requests": 50},
    ),
}
"""Each part, with how much it measures, and how much with --quick."""


class Command(BaseCommand):
    help = "Measures what protection costs, and writes docs/benchmarks.md."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--quick", action="store_true", help="measure less; does not write")
        parser.add_argument("--write", action="store_true", help="write the page even if --quick")
        parser.add_argument("--only", choices=PARTS, help="one part; does not write")

    def handle(self, *, quick: bool, write: bool, only: str | None, **_: Any) -> None:
        call_command("migrate", run_syncdb=True, verbosity=0)
        sections = []
        for name, (measure, full, less) in PARTS.items():
            if only in (None, name):
                sections.append(measure(**(less if quick else full)))
                self.stdout.write(f"{sections[-1]}\n")
        if write or not (quick or only):
            DOCUMENT.parent.mkdir(exist_ok=True)
            DOCUMENT.write_text(page(sections), encoding="utf-8")
            self.stdout.write(f"Written: docs/{DOCUMENT.name}")
