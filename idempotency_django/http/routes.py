"""Routes as people read them: without regular expressions."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Final

from django.contrib.admindocs.utils import (
    remove_non_capturing_groups,
    replace_metacharacters,
    replace_named_groups,
    replace_unnamed_groups,
)

_REGULAR: Final = re.compile(r"[\\^$()\[\]?*+|]")
_PARAMETER: Final = re.compile(r"<(?:[^<>:]+:)?(\w+)>")
_ROUTERS: Final = re.compile(r"\(\?P<(\w+)>\[\^/\.\]\+\)")
"""A parameter as REST framework's routers write it."""


def readable(route: str) -> str:
    """The route as ``/api/charges/{id}/``, also if it was written as a regular expression."""
    if _REGULAR.search(route):
        route = remove_non_capturing_groups(route)
        route = replace_unnamed_groups(replace_named_groups(route))
        route = replace_metacharacters(route).replace("\\", "")
    return "/" + _PARAMETER.sub(r"{\1}", route).removeprefix("/")


@lru_cache(maxsize=4096)
def name_of_route(route: str) -> str:
    """The route in an operation's name: without regular expressions, and unique for each route.

    ``path()`` routes are their own name. The expression that a router makes needs nothing added to
    ``/api/charges/{pk}/``; to any other expression a digest is added.
    """
    if not _REGULAR.search(route):
        return f"/{route}"
    simple = _ROUTERS.sub(r"{\1}", route).replace("^", "")
    if simple.endswith("$") and not re.search(r"[.]|" + _REGULAR.pattern, simple[:-1]):
        return f"/{simple[:-1]}"
    return f"{readable(route)} #{hashlib.sha256(route.encode()).hexdigest()[:8]}"
