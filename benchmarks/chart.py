"""A chart of bars, as an SVG image of its own.

It brings its background, light or dark as the reader's system is, so its text can be read on every
page; colours are not all that tells its bars apart; and it says what it shows to who cannot see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 780
LEFT, RIGHT = 270, 60  # for names; for what a bar says
TOP, BAR, GAP, HEADING = 84, 15, 12, 30

STYLE: Final = """
svg { color-scheme: light dark; font: 13px system-ui, sans-serif; }
.paper { fill: #ffffff; }
text { fill: #1f2328; stroke: #ffffff; stroke-width: 4; paint-order: stroke; }
.heading { font-weight: bold; } .title { font-size: 16px; font-weight: bold; }
.end { text-anchor: end; }
.one { fill: #0b62a8; } .two { fill: #b45309; } .base { stroke: #6b7280; stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #16181c; } text { fill: #e6e8eb; stroke: #16181c; }
  .one { fill: #4aa3e8; } .two { fill: #e0913a; } .base { stroke: #9ca3af; }
}
"""


@dataclass(frozen=True)
class Row:
    """A name, and the length of its bar in each series."""

    name: str
    bars: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """Rows under headings; a dashed line is at 1, to which everything is compared."""

    title: str
    series: Sequence[str]
    groups: Sequence[tuple[str, Sequence[Row]]]

    def words(self) -> str:
        """All that the chart shows."""
        groups = []
        for heading, rows in self.groups:
            named = [f"{row.name} {' and '.join(map(_label, row.bars))}" for row in rows]
            groups.append(f"{heading}: {'; '.join(named)}.")
        return " ".join([f"{self.title}: {', and '.join(self.series)}.", *groups])

    def svg(self) -> str:
        parts, y = [], TOP
        for heading, rows in self.groups:
            parts.append(_text(16, y + 14, heading, "heading"))
            y += HEADING
            for row in rows:
                parts += self._row(row, y)
                y += BAR * len(row.bars) + GAP
        one = self._x(1)
        parts.insert(0, f'<path class="base" d="M{one:.1f} {TOP}V{y}"/>')
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 8}" '
            f'width="{WIDTH}" height="{y + 8}" role="img" aria-labelledby="title words">\n'
            f'<title id="title">{escape(self.title)}</title>\n'
            f'<desc id="words">{escape(self.words())}</desc>\n'
            f"<style>{STYLE}</style>\n"
            f'<rect class="paper" width="{WIDTH}" height="{y + 8}" rx="8"/>\n'
            + "\n".join([*self._legend(), *parts])
            + "\n</svg>\n"
        )

    def _legend(self) -> Iterator[str]:
        yield _text(16, 28, self.title, "title")
        x = 16
        for name, kind in zip(self.series, ("one", "two"), strict=True):
            yield f'<rect class="{kind}" x="{x}" y="45" width="{BAR}" height="{BAR}"/>'
            yield _text(x + BAR + 6, 57, name)
            x += BAR + 30 + 7 * len(name)

    def _row(self, row: Row, y: int) -> Iterator[str]:
        yield _text(LEFT - 10, y + BAR * len(row.bars) / 2 + 4, row.name, "end")
        for bar, kind in zip(row.bars, ("one", "two"), strict=True):
            end = self._x(bar)
            yield (
                f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" '
                f'height="{BAR - 1}"/>'
            )
            yield _text(end + 6, y + 12, _label(bar))
            y += BAR

    def _x(self, value: float) -> float:
        longest = max(bar for _, rows in self.groups for row in rows for bar in row.bars)
        return LEFT + (WIDTH - LEFT - RIGHT) * value / max(longest, 1)


def _label(length: float) -> str:
    return f"{length:.2f}"


def _text(x: float, y: float, text: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
