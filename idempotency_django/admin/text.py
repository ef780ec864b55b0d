"""Texts of clients, laid out for a page: as text that is never taken for HTML."""

from __future__ import annotations

from typing import Final

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import Truncator

LONGEST_TEXT: Final = 100_000
"""The most characters of a text that are shown."""


def cut(text: str, length: int) -> SafeString:
    """The text, or its beginning; all of it is a tooltip."""
    return format_html('<span title="{}">{}</span>', text, Truncator(text).chars(length))


def two_lines(text: str, below: str) -> SafeString:
    """A text, and below it what it belongs to; see :func:`cut`."""
    lines = '<div>{}</div><div class="quiet">{}</div>'
    return format_html(lines, cut(text, 60), cut(below, 60))


def preformatted(text: str) -> SafeString:
    """A text as it is, up to the limit, or a dash for none."""
    if not text:
        return SafeString("–")
    shown = Truncator(text).chars(LONGEST_TEXT)
    return format_html('<pre class="idempotency-content" tabindex="0">{}</pre>', shown)
