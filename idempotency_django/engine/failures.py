"""The errors of failed steps, as they are stored and raised again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from ..errors import StepFailed
from ..records import Step

LONGEST: Final = 4096  # characters of an error's text, and of each of its attributes

_encode = json.JSONEncoder(allow_nan=False).encode


def stored_as(error: Exception) -> str:
    """The error as JSON: its classes, its text, and those of its arguments and attributes that are.

    What is longer than ``LONGEST`` is left out. Arguments belong together: if one of them is not
    JSON, the text replaces all of them.
    """
    text = text_of(error)[:LONGEST]
    attributes = {n: v for n, v in vars(error).items() if not n.startswith("__") and _is_kept(v)}
    return _encode(
        {
            "classes": [_path(cls) for cls in type(error).__mro__ if issubclass(cls, Exception)],
            "text": text,
            "args": list(error.args) if _is_kept(error.args) else [text],
            "attributes": attributes,
        }
    )


def raised_as(step: Step, expected: Iterable[type[Exception]]) -> Exception:
    """The error that a step failed with, to be raised again.

    Args:
        step: one that has failed.
        expected: classes that may be raised; the closest one is, else ``StepFailed``.
    """
    stored = json.loads(step.failure)
    known = {_path(cls): cls for cls in expected}
    closest = next((known[path] for path in stored["classes"] if path in known), None)
    error = None if closest is None else _made(closest, stored)
    if error is None:
        name = stored["classes"][0].rpartition(".")[2]
        return StepFailed(step.name, step.attempt, name, stored["text"])
    error.add_note(
        f"The step {step.name!r} failed with this error in attempt {step.attempt}, which went on "
        "without the step, so the step is not called again."
    )
    return error


def _made(cls: type[Exception], stored: dict[str, Any]) -> Exception | None:
    try:
        # Not by its __init__, whose arguments may be others than the error's.
        error = cls.__new__(cls, *stored["args"])
        error.args = tuple(stored["args"])
        vars(error).update(stored["attributes"])
    except Exception:  # noqa: BLE001  # a class of its own kind
        return None
    return error


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def text_of(error: BaseException) -> str:
    """The text of an error, also if its own ``__str__()`` fails."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001  # the error is told of nevertheless
        return f"its text cannot be made ({type(failure).__name__})"


def named(error: BaseException) -> str:
    """The class of an error and its text, for records and logs."""
    return f"{type(error).__name__}: {text_of(error)}"


def _is_kept(value: object) -> bool:
    """Whether a value is JSON, and not a whole response, as the errors of SDKs carry it."""
    try:
        return len(_encode(value)) <= LONGEST
    except (TypeError, ValueError, RecursionError):
        return False
