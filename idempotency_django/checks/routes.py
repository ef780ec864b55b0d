"""Routes as people read them: without regular expressions."""

from __future__ import annotations

import re
from typing import Final

from django.contrib.admindocs.views import simplify_regex

_LITERAL: Final = re.compile(r"\^([\w/-]*)(?![?*+{])")
_PARAMETER: Final = re.compile(r"<(?:[^<>:]+:)?(\w+)>")


def readable_route(route: str) -> str:
    """The route as ``/api/charges/{id}/``, also if it was written as a regular expression."""
    simple: str = simplify_regex(route)
    return _PARAMETER.sub(r"{\1}", simple.replace("\\", ""))


def literal_of(route: str, *, is_regex: bool) -> tuple[str, bool]:
    """The text that every path of a route begins with, and whether that is all of the route."""
    if not is_regex:
        text = route.partition("<")[0]
        return text, text == route
    found = None if "|" in route else _LITERAL.match(route)
    return (found[1], f"^{found[1]}" == route.rstrip("$")) if found else ("", False)
