"""Frameworks without an adapter here: their views are refused, or exempt by the settings."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured

from ..conf import conf
from .opening import innermost, module_of, name_of

FRAMEWORKS: Final = {
    "adrf": "adrf",
    "ariadne": "Ariadne",
    "ariadne_django": "Ariadne",
    "graphene_django": "Graphene",
    "jsonrpc": "a JSON-RPC framework",
    "modernrpc": "django-modern-rpc",
    "ninja": "django-ninja",
    "ninja_extra": "django-ninja-extra",
    "restless": "restless",
    "spyne": "Spyne",
    "strawberry": "Strawberry",
    "strawberry_django": "Strawberry",
    "tastypie": "Tastypie",
}
"""Frameworks whose views authenticate and answer in ways of their own, by their package."""


def refuse_framework(view: Any) -> None:
    """Refuse the views of a framework without an adapter here.

    Raises:
        ImproperlyConfigured: it is such a view; the error names the framework and the ways out.
    """
    framework = framework_of(view)
    if framework is not None:
        package = next(name for name in _packages(view) if name in FRAMEWORKS)
        raise ImproperlyConfigured(
            f"{name_of(innermost(view))} is a view of {framework}, for which idempotency_django "
            f"has no adapter, so it does not know who is calling. Put {package!r} into "
            "IDEMPOTENCY['MIDDLEWARE_EXEMPT'] to leave its views unprotected, and protect the "
            "work itself with idempotent_call()."
        )


def framework_of(view: Any) -> str | None:
    """The framework of the view, if there is no adapter for it here."""
    return next((FRAMEWORKS[name] for name in _packages(view) if name in FRAMEWORKS), None)


def is_exempt_by_module(view: Any) -> bool:
    """Whether ``MIDDLEWARE_EXEMPT`` names a module that the view or a base of it is from."""
    exempt = conf.middleware_exempt
    return bool(exempt) and is_from(view, exempt)


def is_from(view: Any, modules: Collection[str]) -> bool:
    """Whether the view, or a base of its class, is from one of the modules or one below it."""
    return any(
        module == prefix or module.startswith(f"{prefix}.")
        for module in _modules(view)
        for prefix in modules
    )


def _packages(view: Any) -> Iterator[str]:
    return (module.partition(".")[0] for module in _modules(view))


def _modules(view: Any) -> Iterator[str]:
    """The modules that a view's innermost function, or its class, is from."""
    inner = innermost(view)
    view_class = inner if inspect.isclass(inner) else getattr(inner, "cls", None)
    view_class = view_class or getattr(inner, "view_class", None)
    if view_class is None:
        yield module_of(inner)
        owner = getattr(view, "__self__", None)
        view_class = None if owner is None else type(owner)
    for base in getattr(view_class, "__mro__", ()):
        yield base.__module__
