"""Results of tasks as they are stored: JSON, in the form that Celery's own JSON has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from celery.exceptions import Ignore
from kombu.utils.json import dumps, loads

_IGNORED: Final = "celery.Ignore"


@dataclass(frozen=True, slots=True)
class Ignored:
    """The end of a task that raised ``Ignore``, for its reason."""

    reason: str

    def packed(self) -> dict[str, str]:
        """As it is stored."""
        return {"__type__": _IGNORED, "__value__": self.reason}


def packed(task: str, result: Any) -> Any:
    """The result as plain JSON. What Celery's JSON can hold keeps its type: dates, UUIDs, decimals.

    Raises:
        TypeError: it is nothing that Celery's JSON can hold.
    """
    try:
        return json.loads(dumps(result))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The result of the task {task} is not JSON, so that a retry could not be given it: "
            f"{error}. Return plain data, for example a primary key."
        ) from error


def unpacked(stored: Any) -> Any:
    """The result, each time as it was returned first.

    Raises:
        Ignore: the task did.
    """
    if isinstance(stored, dict) and stored.get("__type__") == _IGNORED:
        raise Ignore(stored["__value__"])
    return loads(json.dumps(stored))
