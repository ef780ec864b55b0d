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

WIDTH, ROW, TOP, HALF = 160, 46, 58, 58  # of an actor, of a line; where lines begin; half a box
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
    where = {name: WIDTH * number + WIDTH // 2 for number, name in enumerate(actors)}
    height = TOP + ROW * len(lines) + 12
    parts = list(_lifelines(where, height))
    for number, line in enumerate(lines):
        match = LINE.fullmatch(line)
        if match is None or not set(_named(match)) <= where.keys():
            raise ValueError(f"{line!r} is no line of a sequence of {', '.join(actors)}.")
        parts += _line(match, where, TOP + ROW * number + ROW // 2 + 8)
    return (
        f'<svg class="sequence" role="img" viewBox="0 0 {WIDTH * len(actors)} {height}" '
        f'style="max-width: {WIDTH * len(actors)}px; min-width: {112 * len(actors)}px" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape('. '.join(lines))}</title>{''.join(parts)}</svg>"
    )


def _named(match: re.Match[str]) -> Iterator[str]:
    return filter(None, match.group("sender", "receiver", "dead", "alone"))


def _lifelines(where: dict[str, int], height: int) -> Iterator[str]:
    for name, x in where.items():
        yield f'<path class="life" d="M{x} 38V{height}"/>'
        yield f'<rect x="{x - HALF}" y="4" width="{2 * HALF}" height="34" rx="5"/>'
        yield f'<text class="name" x="{x}" y="26">{escape(name)}</text>'


def _line(match: re.Match[str], where: dict[str, int], y: int) -> Iterator[str]:
    if match["across"]:
        last = max(where.values()) + WIDTH // 2
        yield f'<path class="across" d="M0 {y}H{last}"/>'
        yield _text(last // 2, y - 7, match["across"], "across")
    elif match["dead"]:
        x = where[match["dead"]]
        yield f'<path class="dies" d="M{x - 10} {y - 10}l20 20m0-20l-20 20"/>'
        yield _text(x, y - 16, "killed", "dies")
    elif match["alone"]:
        x, text = where[match["alone"]], match["done"]
        left, width = x - 4 * len(text) - 8, 8 * len(text) + 16
        yield f'<rect class="alone" x="{left}" y="{y - 15}" width="{width}" height="27" rx="4"/>'
        yield _text(x, y + 4, text)
    else:
        yield from _message(match, where[match["sender"]], where[match["receiver"]], y)


def _message(match: re.Match[str], start: int, end: int, y: int) -> Iterator[str]:
    is_response, lost = match["arrow"] != "->", match["arrow"] == "--x"
    middle, forward = (start + end) // 2, 1 if end > start else -1
    tip = middle + 30 * forward if lost else end
    yield f'<path class="{"response" if is_response else "message"}" d="M{start} {y}H{tip}"/>'
    if lost:
        yield f'<path class="dies" d="M{tip - 7} {y - 7}l14 14m0-14l-14 14"/>'
    else:
        yield f'<path class="tip" d="M{tip} {y}l{-9 * forward}-5v10z"/>'
    yield _text(middle, y - 7, match["said"])


def _text(x: int, y: int, text: str, kind: str = "said") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'
