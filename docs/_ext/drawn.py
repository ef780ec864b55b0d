"""Sequence diagrams, drawn from a few lines of text.

==============================  ===============================================================
``actors: Client, Worker``      who takes part, from left to right; the first line
``Client -> Worker: POST``      a message
``Worker --> Client: 201``      a response
``Worker --x Client: 201``      a response that is lost on its way
``Worker: runs the view``       what somebody does alone
``Worker dies``                 the end of somebody; what follows under that name is another one
``= a while later``             a line across
==============================  ===============================================================

It is drawn in the colours of the page, light or dark, and says what it shows to who cannot see it.
"""

# ruff: noqa: INP001  # a folder on Sphinx's path, no package

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

WIDTH, LETTER = 352, 5.6  # of a drawing, which fits onto a telephone; of a letter, on average
ROW, TOP = 40, 44  # of a line; where lines begin
LINE = re.compile(
    r"(?P<sender>\w+) (?P<arrow>->|-->|--x) (?P<receiver>\w+): (?P<said>.+)"
    r"|(?P<dead>\w+) dies|= (?P<across>.+)|(?P<alone>\w+): (?P<done>.+)"
)


def drawing(source: str) -> str:
    """The diagram as an SVG element.

    Raises:
        ValueError: a line is none of those that are known, or names an unknown actor.
    """
    first, *lines = (line.strip() for line in source.strip().splitlines())
    actors = [name.strip() for name in first.removeprefix("actors:").split(",")]
    each = WIDTH // len(actors)
    where = {name: each * number + each // 2 for number, name in enumerate(actors)}
    height = TOP + ROW * len(lines) + 4
    parts = list(_lifelines(where, height))
    for number, line in enumerate(lines):
        match = LINE.fullmatch(line)
        if match is None or not set(_named(match)) <= where.keys():
            raise ValueError(f"{line!r} is no line of a sequence of {', '.join(actors)}.")
        parts += _line(match, where, TOP + ROW * number + ROW // 2)
    return (
        f'<svg class="sequence" role="img" viewBox="0 0 {WIDTH} {height}" '
        'xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape('. '.join(lines))}</title>{''.join(parts)}</svg>"
    )


def _named(match: re.Match[str]) -> Iterator[str]:
    return filter(None, match.group("sender", "receiver", "dead", "alone"))


def _lifelines(where: dict[str, int], height: int) -> Iterator[str]:
    half = min(min(where.values()) - 3, 44)
    for name, x in where.items():
        yield f'<path class="life" d="M{x} 30V{height}"/>'
        yield f'<rect x="{x - half}" y="2" width="{2 * half}" height="28" rx="5"/>'
        yield f'<text class="name" x="{x}" y="20">{escape(name)}</text>'


def _line(match: re.Match[str], where: dict[str, int], y: int) -> Iterator[str]:
    if match["across"]:
        yield f'<path class="across" d="M0 {y}H{WIDTH}"/>'
        yield _text(WIDTH // 2, y - 6, match["across"], "across")
    elif match["dead"]:
        x = where[match["dead"]]
        yield f'<path class="dies" d="M{x - 8} {y - 8}l16 16m0-16l-16 16"/>'
        yield _text(x, y - 13, "killed", "dies")
    elif match["alone"]:
        text = match["done"]
        x, width = _within(where[match["alone"]], text), round(LETTER * len(text)) + 12
        box = f'x="{x - width // 2}" y="{y - 13}" width="{width}" height="23" rx="4"'
        yield f'<rect class="alone" {box}/>'
        yield _text(x, y + 3, text)
    else:
        yield from _message(match, where[match["sender"]], where[match["receiver"]], y)


def _message(match: re.Match[str], start: int, end: int, y: int) -> Iterator[str]:
    is_response, lost = match["arrow"] != "->", match["arrow"] == "--x"
    middle, forward = (start + end) // 2, 1 if end > start else -1
    tip = middle + 24 * forward if lost else end
    yield f'<path class="{"response" if is_response else "message"}" d="M{start} {y}H{tip}"/>'
    if lost:
        yield f'<path class="dies" d="M{tip - 6} {y - 6}l12 12m0-12l-12 12"/>'
    else:
        yield f'<path class="tip" d="M{tip} {y}l{-8 * forward}-4v8z"/>'
    yield _text(_within(middle, match["said"]), y - 6, match["said"])


def _within(x: int, text: str) -> int:
    """Where the middle of a text is, so that all of it is in the drawing."""
    half = round(LETTER * len(text) / 2) + 6
    return min(max(x, half), WIDTH - half)


def _text(x: int, y: int, text: str, kind: str = "said") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'
