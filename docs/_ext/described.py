"""What the code itself says of policy fields."""

# ruff: noqa: INP001  # a folder on Sphinx's path, no package

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from idempotency_django.policy import Policy


def described_fields() -> dict[str, str]:
    """What the docstring of ``Policy`` says of each field."""
    _, _, attributes = inspect.cleandoc(Policy.__doc__ or "").partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.*\n(?:        .*\n)*)", attributes + "\n", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def shown(value: Any) -> str:
    """A default as a reader would write it."""
    match value:
        case timedelta():
            return _shown_duration(value)
        case frozenset():
            return f"{{{', '.join(map(repr, sorted(value)))}}}" if value else "set()"
        case Callable():
            return f"{value.__module__.rpartition('.')[2]}.{value.__name__}"
        case _:
            return repr(value)


def _shown_duration(value: timedelta) -> str:
    seconds = int(value.total_seconds())
    unit, size = ("hours", 3600) if seconds % 3600 == 0 else ("seconds", 1)
    return f"timedelta({unit}={seconds // size})" if seconds else "timedelta(0)"
