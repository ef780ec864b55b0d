"""Stored JSON laid out for people, and no longer than a page can bear."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator

LONGEST_TEXT: Final = 100_000
"""Characters of a text that are shown."""

_WORD: Final = re.compile(r"[^./:_|-]*[./:_|-]+|[^./:_|-]+")
_JSON_PIECE: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s"{}\[\],:]+|[{}\[\],:]')


def indented(text: str) -> str:
    """A JSON text with one member per line, as far as it is shown."""
    return shortened(_indented(text))


def _indented(text: str) -> Iterator[str]:
    """The pieces of a JSON text, laid out; its numbers and members stay as they were written.

    A parser loses what an auditor looks for: 10.50 is not 10.5, and a member may come twice.
    """
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        yield text
        return
    depth, before = 0, ""
    for match in _JSON_PIECE.finditer(text):
        piece = match[0]
        if piece in "}]":
            depth -= 1
            yield "" if before in "{[" else _new_line(depth)
        elif before and before in "{[,":
            yield _new_line(depth)
        yield f"{piece} " if piece == ":" else _legible(piece)
        depth += piece in "{["
        before = piece


def cut(text: str, length: int) -> SafeString:
    """The text, or its beginning, which breaks between its words; all of it is a tooltip."""
    shown = str(Truncator(text).chars(length))
    words = format_html_join(SafeString("<wbr>"), "{}", ((word,) for word in _WORD.findall(shown)))
    return format_html('<span title="{}">{}</span>', text, words)


def _legible(piece: str) -> str:
    """A string with characters in the place of their escapes, unless they are invisible."""
    if "\\u" not in piece:
        return piece
    text = json.dumps(json.loads(piece), ensure_ascii=False)
    return text if text.isprintable() else piece


def _new_line(depth: int) -> str:
    return "\n" + "  " * depth


def shortened(pieces: Iterator[str] | list[str]) -> str:
    """The pieces put together, as far as they are shown; the rest is not even made."""
    text = ""
    for piece in pieces:
        text += piece
        if len(text) > LONGEST_TEXT:
            return f"{text[:LONGEST_TEXT]}…"
    return text
