"""What the tables keep of an error, whatever is in its text."""

from __future__ import annotations

from typing import Final

from ..stores.database.dialects import plain

LONGEST: Final = 4000  # characters


def reason(error: BaseException) -> str:
    """The error as a text that a database takes. An error can quote what a stranger has sent."""
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001  # it must be told of nevertheless
        text = f"its text cannot be made ({type(failure).__name__})"
    return plain(f"{type(error).__name__}: {text}", LONGEST)
