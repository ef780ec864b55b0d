"""The types of the options of commands."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Final

_TOO_MUCH: Final = 1_000_000


def number(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Reads an option that is a number of this kind above 0."""

    def number(text: str) -> float:  # the name is in argparse's error for what is no number
        value = kind(text)
        if not 0 < value < _TOO_MUCH:
            raise ArgumentTypeError(f"{text!r} must be above 0 and below {_TOO_MUCH:,}.")
        return value

    return number
