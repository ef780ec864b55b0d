"""A stored answer made readable, as text that is never taken for HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import responses
from typing import Any, Final

from django.utils.http import parse_header_parameters

from ..stores.codec import decode

LONGEST_TEXT: Final = 100_000
LONGEST_DUMP: Final = 256
"""Characters of a text, and bytes of anything else, that are shown."""

_TEXTUAL: Final = re.compile(
    r"text/.*|application/(json|xml|javascript|x-www-form-urlencoded|.*\+json|.*\+xml)"
)
_JSON_PIECE: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s"{}\[\],:]+|[{}\[\],:]')


@dataclass(frozen=True, slots=True)
class Answer:
    """What the owner of a record answered.

    Attributes:
        status: the status code and its name; empty when there is no answer.
        headers: as ``(name, value)`` pairs, in order.
        body: the exact bytes; ``None``: not kept.
        error: why the attempt was rolled back.
    """

    status: str
    headers: Sequence[tuple[str, str]]
    body: bytes | None
    error: str

    @classmethod
    def of(cls, rows: Any) -> Answer | None:
        """The answer of the one record among ``rows``; ``None``: it has been purged since."""
        stored = rows.values_list(
            "response_status", "response_headers", "response_body", "error"
        ).first()
        if stored is None:
            return None
        code, headers, body, error = stored
        answer = decode(code, headers, body)
        return cls(_named(code), answer.headers, answer.body, error)

    @property
    def size(self) -> int:
        """Bytes in the body."""
        return len(self.body or b"")

    @property
    def text(self) -> str | None:
        """The body as text, JSON with one member per line; ``None`` where it is no text."""
        sent = {name.lower(): value for name, value in self.headers}
        media_type, parameters = parse_header_parameters(sent.get("content-type", ""))
        if "content-encoding" in sent or not _TEXTUAL.fullmatch(media_type):
            return None
        try:
            text = (self.body or b"").decode(parameters.get("charset", "utf-8"))
            text.encode()  # some charsets have characters that no page can show
        except (LookupError, ValueError):
            return None
        return indented(text) if media_type.endswith("json") else _shortened([text])

    @property
    def dump(self) -> str:
        """The first bytes of the body, in hexadecimal and ASCII."""
        start = (self.body or b"")[:LONGEST_DUMP]
        lines = [_dumped(start[at : at + 16], at) for at in range(0, len(start), 16)]
        return "\n".join([*lines, "…"] if self.size > len(start) else lines)


def indented(text: str) -> str:
    """A JSON text with one member per line, as far as it is shown."""
    return _shortened(_indented(text))


def _named(code: int | None) -> str:
    if code is None:
        return ""
    return f"{code} {responses.get(code, '')}".strip()


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


def _legible(piece: str) -> str:
    """A string with characters in the place of their escapes, unless they are invisible."""
    if "\\u" not in piece:
        return piece
    text = json.dumps(json.loads(piece), ensure_ascii=False)
    return text if text.isprintable() else piece


def _new_line(depth: int) -> str:
    return "\n" + "  " * depth


def _shortened(pieces: Iterator[str] | list[str]) -> str:
    """The pieces put together, as far as they are shown; the rest is not even made."""
    text = ""
    for piece in pieces:
        text += piece
        if len(text) > LONGEST_TEXT:
            return f"{text[:LONGEST_TEXT]}…"
    return text


def _dumped(line: bytes, at: int) -> str:
    legible = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)
    return f"{at:08x}  {line.hex(' '):<47}  {legible}"
