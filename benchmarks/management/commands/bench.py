"""Measures everything and writes the page."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from django.core.management import BaseCommand, CommandParser, call_command
from django.db import connection

from benchmarks import (
    conditional,
    consumers,
    growth,
    inprocess,
    outbox,
    overhttp,
    plain,
    streams,
    webhooks,
)
from benchmarks.report import DOCUMENTATION, PAGE, Section, write
from benchmarks.site import Site, site

Amount = dict[str, int]
AMOUNTS: Final[dict[str, tuple[Amount, Amount]]] = {
    "in-process": (
        {"rounds": 12, "requests": 200},
        {"rounds": 2, "requests": 10},
    ),
    "plain": (
        {"rounds": 12, "calls": 200, "races": 5, "owners": 5},
        {"rounds": 2, "calls": 10, "races": 1, "owners": 1},
    ),
    "over-http": (
        {"rounds": 12, "requests": 400, "races": 5},
        {"rounds": 2, "requests": 40, "races": 1},
    ),
    "consumers": (
        {"rounds": 12, "calls": 200},
        {"rounds": 2, "calls": 10},
    ),
    "streams": (
        {"rounds": 12, "calls": 200},
        {"rounds": 2, "calls": 10},
    ),
    "outbox": (
        {"rounds": 12, "calls": 200, "messages": 5_000},
        {"rounds": 2, "calls": 20, "messages": 200},
    ),
    "webhooks": (
        {"rounds": 12, "calls": 60},
        {"rounds": 2, "calls": 20},
    ),
    "conditional": (
        {"rounds": 12, "calls": 200, "races": 5},
        {"rounds": 2, "calls": 10, "races": 1},
    ),
    "growth": (
        {"rows": 2_000_000, "expired": 1_000_000, "rounds": 12, "requests": 200},
        {"rows": 20_000, "expired": 20_000, "rounds": 2, "requests": 20},
    ),
}
"""How much each part measures, and how much with --quick."""


class Command(BaseCommand):
    help = f"Measures what protection costs, and writes docs/{PAGE} and its chart."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--quick", action="store_true", help="measure little, for development; writes no page"
        )
        parser.add_argument("--only", choices=AMOUNTS, help="one part; writes no page")
        parser.add_argument(
            "--into", type=Path, help="write the page into this folder, even if it is a quick one's"
        )

    def handle(self, *, quick: bool, only: str | None, into: Path | None, **_: Any) -> None:
        call_command("migrate", run_syncdb=True, verbosity=0)
        amounts = {name: less if quick else full for name, (full, less) in AMOUNTS.items()}
        if only:
            amounts = {only: amounts[only]}
        elif not quick:
            into = into or DOCUMENTATION
        sections = []
        with site() as place:
            for name, amount in amounts.items():
                sections.append(_measure(name, place, amount))
                self.stdout.write(f"{sections[-1]}\n")
                self.stdout.flush()
        if into and not only:
            self.stdout.write(f"Written: {write(into, sections, _setting())}")


def _measure(name: str, place: Site, amount: Amount) -> Section:
    match name:
        case "in-process":
            return inprocess.measure(place, **amount)
        case "plain":
            return plain.measure(place, **amount)
        case "over-http":
            return overhttp.measure(**amount)
        case "consumers":
            return consumers.measure(**amount)
        case "streams":
            return streams.measure(**amount)
        case "outbox":
            return outbox.measure(**amount)
        case "webhooks":
            return webhooks.measure(**amount)
        case "conditional":
            return conditional.measure(**amount)
    return growth.measure(**amount)


def _setting() -> str:
    """When the run was made, and on what."""
    names = ["Django", "djangorestframework", "psycopg", "redis", "gunicorn"]
    names += ["django-concurrency", "django-fsm-2", "drf-extensions"]
    names += ["django-idempotency-key", "aws-lambda-powertools", "django-outbox-pattern"]
    names += ["django-domain-events", "dj-stripe"]
    major, minor = divmod(connection.cursor().connection.info.server_version, 10_000)
    parts = [f"{datetime.now(UTC).date()}: Python {platform.python_version()}"]
    parts += [f"PostgreSQL {major}.{minor}", f"Valkey {os.environ['BENCH_REDIS_VERSION']}"]
    parts += [f"{name} {version(name)}" for name in names]
    return ", ".join([*parts, f"{os.cpu_count()} processor cores"])
