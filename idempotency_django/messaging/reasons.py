"""What the tables keep of an error, whatever is in its text."""

from __future__ import annotations

from typing import Final

from ..engine.failures import named
from ..stores.database.dialects import plain

LONGEST: Final = 4000  # characters


def reason(error: BaseException) -> str:
    """The error as a text that a database takes. An error can quote what a stranger has sent."""
    return plain(named(error), LONGEST)
