"""The types of the options of commands."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import timedelta
from typing import Final

_UNITS: Final = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
_CENTURY: Final = timedelta(days=36_500)  # databases know no dates from far before our era
_TOO_MUCH: Final = 1_000_000


def number(kind: Callable[[str], float], example: str) -> Callable[[str], float]:
    """Reads an option that is a number above 0, of this kind, such as the example."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < _TOO_MUCH:
            raise ArgumentTypeError(
                f"{text!r} must be a number above 0 and below {_TOO_MUCH:,}, such as {example}."
            )
        return value

    return read


def duration(text: str) -> timedelta:
    """Reads a duration: ``7d``, ``12h``, ``30m``, ``90s``."""
    match = re.fullmatch(r"([0-9]{1,9})([dhms])", text)
    length = timedelta(**{_UNITS[match[2]]: int(match[1])}) if match else None
    if length is None or length > _CENTURY:
        raise ArgumentTypeError(
            f"{text!r} is not a duration of up to a century. Write a number and its unit, "
            "without a space: 7d, 12h, 30m or 90s."
        )
    return length
