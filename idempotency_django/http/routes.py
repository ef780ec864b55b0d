"""Which views the middleware protects by their route, and what an operation is called by it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from django.utils.translation import get_language_from_path

from ..conf import ALL_UNSAFE, conf

_ROUTERS: Final = re.compile(r"\(\?P<(\w+)>\[\^/\.\]\+\)")
"""A parameter as REST framework's routers write it."""


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
        below = "/" + path[1:].partition("/")[2]  # of i18n_patterns(): each language is covered
        in_language = below.startswith(chosen) and get_language_from_path(path) is not None
        return path.startswith(chosen) or in_language
    return f":{chosen}:" in f":{':'.join(namespaces)}:"


@lru_cache(maxsize=4096)
def name_of_route(route: str) -> str:
    """The route in an operation's name, unique for each route: as it is written.

    Only the expressions of REST framework's routers are easier to read: ``/charges/{pk}/``.
    """
    simple = _ROUTERS.sub(r"{\1}", route).replace("^", "")
    if simple.endswith("$") and not re.search(r"[.\\$()\[\]?*+|]", simple[:-1]):
        return f"/{simple[:-1]}"
    return f"/{route}"
