"""Django's own backends, with a boundary before and after whatever goes to the server.

They stay Django's own, and no wrapper is around their statements: either would have each statement
sent alone, and the way of all projects would be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from .boundaries import boundaries

_STEPS = {
    "connect": lambda *_: "CONNECT",
    "set_autocommit": lambda autocommit, *_: "AUTOCOMMIT" if autocommit else "BEGIN",
    "_commit": lambda *_: "COMMIT",
    "_rollback": lambda *_: "ROLLBACK",
}


def number_statements() -> None:
    """Number the statements of every connection of this process, and where transactions end."""
    for name, called in _STEPS.items():
        _number(BaseDatabaseWrapper, name, called)
    _number(CursorWrapper, "execute", lambda sql, *_: " ".join(str(sql).split())[:60])


def _number(owner: type, name: str, called: Callable[..., str]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def numbered(self: Any, *args: Any, **kwargs: Any) -> Any:
        with boundaries.around(called(*args)):
            return original(self, *args, **kwargs)

    setattr(owner, name, numbered)
