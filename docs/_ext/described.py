"""What the code itself says of policy fields."""

# ruff: noqa: INP001  # a folder on Sphinx's path, no package

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any

from idempotency_django.policy import Policy


def described_fields() -> Iterator[tuple[str, str]]:
    """The name of each policy field, in the order of the code, and the text below it."""
    [policy] = ast.parse(inspect.getsource(Policy)).body
    for statement, following in pairwise(ast.iter_child_nodes(policy)):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                yield name, " ".join(text.split())


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
