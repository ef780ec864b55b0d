"""Escapes client data in log records, so that each record stays on one line."""

from __future__ import annotations

import logging
import re
from typing import Final

_CONTROLS: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that control, end a line or change the direction of text, and bytes that are none."""


def escaped(text: str) -> str:
    """The text on one line: a control character, such as a decoded ``%0A``, is an escape."""
    return _CONTROLS.sub(lambda control: control[0].encode("unicode_escape").decode(), text)


def escape_message(record: logging.LogRecord) -> bool:
    """Escape the message of a record; the filter of the package's logger."""
    try:
        message = record.getMessage()
    except Exception:  # noqa: BLE001  # an argument has no text: the handlers say so
        return True
    if _CONTROLS.search(message):
        record.msg, record.args = escaped(message), ()
    return True
