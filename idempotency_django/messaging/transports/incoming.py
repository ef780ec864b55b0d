"""A message as its broker has delivered it, and the event in it.

Source: the protocol bindings of CloudEvents 1.0.2. They differ in the prefix of an attribute's
header: ``ce_`` for Kafka, ``cloudEvents:`` or ``cloudEvents_`` for AMQP, ``ce-`` for HTTP. Bridges
between brokers keep the prefix of the other side, so each of them is read everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

from .. import envelopes
from ..events import Event

MAX_HEADERS: Final = 64 * 1024
"""How many characters the names and values of a message's headers may have."""

_ATTRIBUTE: Final = re.compile(r"(?:ce[_-]|cloudevents[:_])(.+)", re.IGNORECASE)
_ENVELOPE: Final = "application/cloudevents"
_CONTENT_TYPES: Final = frozenset({"content-type", "content_type", "contenttype"})


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """One delivery of a message.

    Attributes:
        place: where it is at its broker; the same at each delivery, as far as the broker can say.
        body: its body, as it came.
        headers: its headers, with its media type as ``content-type``.
        redelivered: whether it may have been delivered before.
        native: the message of the broker's client library.
        error: why the body is not what the sender has sent; ``None``: it is.
    """

    place: str
    body: bytes
    headers: Sequence[tuple[str, Any]]
    redelivered: bool
    native: Any
    error: Exception | None = None

    @property
    def texts(self) -> list[tuple[str, str]]:
        """The headers as texts, whatever is in them."""
        return [(name, as_text(value)) for name, value in self.headers]

    def refuse_large(self, max_body_bytes: int) -> None:
        """Raise ``ValueError`` if the body or the headers are too large to be read."""
        if len(self.body) > max_body_bytes:
            raise ValueError(
                f"The body has {len(self.body)} bytes, which is more than {max_body_bytes} "
                "(max_body_bytes)."
            )
        if (size := sum(len(name) + len(text) for name, text in self.texts)) > MAX_HEADERS:
            raise ValueError(
                f"The headers have {size} characters, which is more than {MAX_HEADERS}."
            )


def as_text(value: Any) -> str:
    """A header's value as a text, whatever it is."""
    try:
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    except RecursionError:
        return "nested too deeply to be shown"


def event_of(message: Incoming) -> Event:
    """The event in a message: its attributes are headers, or all of it is JSON in the body.

    Raises:
        ValueError: there is none; the text says why.
    """
    attributes: dict[str, str] = {}
    content_type = ""
    for name, value in message.headers:
        if value is None:
            continue
        attribute = _ATTRIBUTE.fullmatch(name)
        if attribute:
            header = f"ce-{attribute[1].lower()}"
            if header in attributes:
                raise ValueError(f"The message has two headers for the attribute {attribute[1]}.")
            attributes[header] = quote(_text(name, value), safe="")
        elif name.lower() in _CONTENT_TYPES:
            content_type = _text(name, value)
    if not attributes and not content_type.startswith(_ENVELOPE):
        content_type = envelopes.STRUCTURED  # or it is none: many senders set another type
    headers = {**attributes, **({"content-type": content_type} if content_type else {})}
    return Event.from_http(headers, message.body)


def _text(name: str, value: Any) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ValueError(f"The header {name} is not text in UTF-8.") from None
    if isinstance(value, datetime):
        return envelopes.write_time(value)
    return str(value).lower() if isinstance(value, bool) else as_text(value)
