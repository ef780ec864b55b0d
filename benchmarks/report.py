"""What was measured, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

DOCUMENTATION: Final = Path(__file__).parents[1] / "docs"
PAGE: Final = Path("benchmarks.md")
CHART: Final = Path("_static", "benchmarks.svg")

INTRODUCTION: Final = """\
## How to read this page

`make bench` made it ({setting}). The load generator, the application and the servers ran together
on this machine, with PostgreSQL's default durability.

Read the ratios, not the times. A ratio compares two things that were measured in turn in the same
run, and its range shows how much the machine was disturbed. The handler makes one INSERT. A real
handler does more, so protection costs a smaller part of the whole."""


class Table:
    """Rows under headings."""

    def __init__(self, headings: Sequence[str]) -> None:
        self._headings = list(headings)
        self._rows: list[list[str]] = []

    def head(self, *headings: str) -> None:
        """Append some headings."""
        self._headings += headings

    def add(self, *cells: object) -> None:
        self._rows.append([str(cell) for cell in cells])

    def __str__(self) -> str:
        rows = [self._headings, ["---"] * len(self._headings), *self._rows]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


class Target(NamedTuple):
    """What a run is to show, and whether it did."""

    text: str
    met: bool


@dataclass(frozen=True)
class Opening:
    """What a newcomer reads and sees first."""

    text: str
    chart: str
    alternative: str
    """The chart in words, for those who do not see it."""


@dataclass
class Section:
    """One part of the page; the terminal also shows details, and targets met or missed.

    A section without parts is for the terminal only.
    """

    title: str
    parts: Sequence[str | Table]
    targets: Sequence[Target] = ()
    opening: Opening | None = None
    details: Sequence[str | Table] = ()

    def on_page(self) -> str:
        return "\n\n".join([f"## {self.title}", *map(str, self.parts)])

    def __str__(self) -> str:
        parts = [self.on_page(), *map(str, self.details)]
        if self.targets:
            lines = [f"- {'met' if met else '**missed**'}: {text}" for text, met in self.targets]
            parts.append("\n".join(lines))
        return "\n\n".join(parts)


def write(folder: Path, sections: Sequence[Section], setting: str) -> Path:
    """Write the page and its chart into a folder of documentation; return the page's path.

    One of the sections has the opening. ``setting`` says when, and on what, the run was made.
    """
    opening = next(section.opening for section in sections if section.opening)
    for path, content in {
        PAGE: page(opening, sections, setting),
        CHART: opening.chart,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")
    return folder / PAGE


def page(opening: Opening, sections: Sequence[Section], setting: str) -> str:
    parts = ["# Benchmarks", opening.text, f"![{opening.alternative}]({CHART.as_posix()})"]
    parts.append(INTRODUCTION.format(setting=setting))
    parts += [section.on_page() for section in sections if section.parts]
    return "\n\n".join(parts) + "\n"
