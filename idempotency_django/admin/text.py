"""Texts of clients, laid out for a page: as text that is never taken for HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Final

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator

LONGEST_TEXT: Final = 100_000
"""The most characters of a text that are shown."""

_WORD: Final = re.compile(r"[^./:_|-]*[./:_|-]+|[^./:_|-]+")
_JSON_PIECE: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s"{}\[\],:]+|[{}\[\],:]')


def cut(text: str, length: int) -> SafeString:
    """The text, or its beginning, which breaks between its words; all of it is a tooltip."""
    shown = str(Truncator(text).chars(length))
    words = format_html_join(SafeString("<wbr>"), "{}", ((word,) for word in _WORD.findall(shown)))
    return format_html('<span title="{}">{}</span>', text, words)


def two_lines(text: str, below: str) -> SafeString:
    """A text, and below it what it belongs to; see :func:`cut`."""
    lines = '<div>{}</div><div class="quiet">{}</div>'
    return format_html(lines, cut(text, 60), cut(below, 60))


def preformatted(text: str) -> SafeString:
    """A text as it is, or a dash for none."""
    if not text:
        return SafeString("–")
    return format_html('<pre class="idempotency-content" tabindex="0">{}</pre>', text)


def shortened(pieces: Iterable[str]) -> str:
    """The joined pieces, up to the limit; the rest is not generated."""
    text = ""
    for piece in pieces:
        text += piece
        if len(text) > LONGEST_TEXT:
            return f"{text[:LONGEST_TEXT]}…"
    return text


def indented(text: str) -> str:
    """A JSON text with one member per line, up to the limit; any other text unchanged.

    A parser loses what an auditor looks for: 10.50 is not 10.5, and a member may come twice. So the
    numbers and members stay as they were written.
    """
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return shortened([text])
    return shortened(_laid_out(text))


def _laid_out(text: str) -> Iterator[str]:
    depth, before = 0, ""
    for match in _JSON_PIECE.finditer(text):
        piece = match[0]
        depth -= piece in "}]"
        empty = piece in "}]" and before in "{["
        if (piece in "}]" or (before and before in "{[,")) and not empty:
            yield "\n" + "  " * depth
        yield f"{piece} " if piece == ":" else _legible(piece)
        depth += piece in "{["
        before = piece


def _legible(piece: str) -> str:
    """A string with characters in the place of their escapes, unless they are invisible."""
    if "\\u" not in piece:
        return piece
    text = json.dumps(json.loads(piece), ensure_ascii=False)
    return text if text.isprintable() else piece
