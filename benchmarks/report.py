"""What was measured, as Markdown."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

from django.db import connection

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"

INTRODUCTION: Final = """\
# Benchmarks

`make bench` made this page ({date}): {versions}; {cores} processor cores, on which the load
generator, the application and the servers ran together. PostgreSQL ran with its default durability
(`fsync` and `synchronous_commit` on).

Read the ratios, not the times. Times depend on the machine. A ratio compares two things that were
measured in turn in the same run, and its range over the rounds shows how much the machine was
disturbed. The handler does as little as possible, one INSERT. A real handler does more, so
protection costs a smaller part of the whole.
"""


class Table:
    """Rows under headings."""

    def __init__(self, headings: Sequence[str]) -> None:
        self._rows = [headings, ["---"] * len(headings)]

    def add(self, *cells: object) -> None:
        self._rows.append([str(cell) for cell in cells])

    def __str__(self) -> str:
        return "\n".join(f"| {' | '.join(row)} |" for row in self._rows)


@dataclass
class Section:
    """One part of the page, and the targets that it shows to be met or missed."""

    title: str
    parts: Sequence[str | Table]
    targets: Sequence[tuple[str, bool]] = ()

    def __str__(self) -> str:
        parts = [f"## {self.title}", *map(str, self.parts)]
        if self.targets:
            lines = [f"- {'met' if met else '**missed**'}: {text}" for text, met in self.targets]
            parts.append("\n".join(lines))
        return "\n\n".join(parts)


def page(sections: Sequence[Section]) -> str:
    names = ["Django", "djangorestframework", "psycopg", "redis", "gunicorn"]
    names += ["django-idempotency-key", "aws-lambda-powertools"]
    versions = [f"Python {platform.python_version()}", f"PostgreSQL {_postgres_version()}"]
    versions += [f"Valkey {os.environ['BENCH_REDIS_VERSION']}"]
    versions += [f"{name} {version(name)}" for name in names]
    introduction = INTRODUCTION.format(
        date=datetime.now(UTC).date(), versions=", ".join(versions), cores=os.cpu_count()
    )
    return "\n\n".join([introduction.strip(), *map(str, sections)]) + "\n"


def _postgres_version() -> str:
    major, rest = divmod(connection.cursor().connection.info.server_version, 10_000)
    return f"{major}.{rest}"
