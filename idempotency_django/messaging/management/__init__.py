"""What the commands of messaging share."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable


def number(kind: Callable[[str], float], example: str) -> Callable[[str], float]:
    """Reads an option that is a number above 0."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < 1_000_000:
            raise ArgumentTypeError(f"{text!r} must be a number above 0, such as {example}.")
        return value

    return read
