"""Routes as people read them: without regular expressions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from django.contrib.admindocs.utils import (
    remove_non_capturing_groups,
    replace_metacharacters,
    replace_named_groups,
)
from django.urls.converters import get_converters
from django.utils.translation import get_language_from_path

from ..conf import ALL_UNSAFE, conf

_REGULAR: Final = re.compile(r"[\\^$()\[\]?*+|]")
_LITERAL: Final = re.compile(r"\^((?:[\w/-]|\\\W)*)(?![?*+{])")
_CHARACTER: Final = re.compile(r"\\.|.")
_PARAMETER: Final = re.compile(r"<(?:([^<>:]+):)?(\w+)>")
_ROUTERS: Final = re.compile(r"\(\?P<(\w+)>\[\^/\.\]\+\)")
"""A parameter as REST framework's routers write it."""


def readable_route(route: str) -> str:
    """The route as ``/api/charges/{id}/``, also if it was written as a regular expression.

    A parameter whose converter takes slashes is ``{+name}``, as in the templates of RFC 6570.
    """
    if _REGULAR.search(route):
        route = _without_groups(replace_named_groups(remove_non_capturing_groups(route)))
        route = replace_metacharacters(route).replace("\\", "")
    return "/" + _PARAMETER.sub(_parameter, route).removeprefix("/")


def is_covered(path: str, namespaces: Sequence[str]) -> bool:
    """Whether ``MIDDLEWARE_PROTECTS`` names a view that declares no policy.

    Args:
        path: the path of a request, or a readable route.
        namespaces: the URL namespaces that the view is in, the outermost first.
    """
    chosen = conf.middleware_protects
    if isinstance(chosen, str):
        return chosen == ALL_UNSAFE
    return any(is_named(each, path, namespaces) for each in chosen)


def is_named(chosen: str, path: str, namespaces: Sequence[str]) -> bool:
    """Whether a path prefix or a URL namespace names a view; see :func:`is_covered`."""
    if chosen.startswith("/"):
        if get_language_from_path(path):  # of i18n_patterns(): each language is covered
            below = "/" + path[1:].partition("/")[2]
            return path.startswith(chosen) or below.startswith(chosen)
        return path.startswith(chosen)
    return f":{chosen}:" in f":{':'.join(namespaces)}:"


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
    return f"{readable_route(route)} #{hashlib.sha256(route.encode()).hexdigest()[:8]}"
