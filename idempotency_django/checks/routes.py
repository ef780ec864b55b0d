"""Routes as people read them: without regular expressions."""

from __future__ import annotations

import re
from typing import Final

from django.contrib.admindocs.utils import (
    remove_non_capturing_groups,
    replace_metacharacters,
    replace_named_groups,
)
from django.urls.converters import get_converters

_REGULAR: Final = re.compile(r"[\\^$()\[\]?*+|]")
_LITERAL: Final = re.compile(r"\^((?:[\w/-]|\\\W)*)(?![?*+{])")
_CHARACTER: Final = re.compile(r"\\.|.")
_PARAMETER: Final = re.compile(r"<(?:([^<>:]+):)?(\w+)>")


def readable_route(route: str) -> str:
    """The route as ``/api/charges/{id}/``, also if it was written as a regular expression.

    A parameter whose converter takes slashes is ``{+name}``, as in the templates of RFC 6570.
    """
    if _REGULAR.search(route):
        route = _without_groups(replace_named_groups(remove_non_capturing_groups(route)))
        route = replace_metacharacters(route).replace("\\", "")
    return "/" + _PARAMETER.sub(_parameter, route).removeprefix("/")


def literal_of(route: str, *, is_regex: bool) -> tuple[str, bool]:
    """The text that every path of a route begins with, and whether that is all of the route."""
    if not is_regex:
        text = route.partition("<")[0]
        return text, text == route
    if not route.startswith("^") or "|" in _without_groups(route):  # it may begin in other ways
        return "", False
    found = _LITERAL.match(route)
    text = found[1] if found else ""
    return text.replace("\\", ""), len(text) == len(route.rstrip("$")) - 1


def _without_groups(route: str) -> str:
    """The expression with ``<var>`` in the place of each group; Django's own function repeats parts
    of a route with several.
    """
    parts, depth = [], 0
    for part in _CHARACTER.findall(route):
        if part == "(":
            parts += ["<var>"] if depth == 0 else []
            depth += 1
        elif part == ")":
            depth -= 1
        elif depth == 0:
            parts.append(part)
    return "".join(parts)


def _parameter(found: re.Match[str]) -> str:
    converter = get_converters().get(found[1])
    takes_slashes = converter is not None and re.fullmatch(converter.regex, "a/b")
    return f"{{{'+' if takes_slashes else ''}{found[2]}}}"
