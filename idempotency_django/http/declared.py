"""What a view is made of, and what it declares: its class, handlers, policy, marks and names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import get_language_from_path
from django.views.generic import View

from ..conf import ALL_UNSAFE, conf
from ..policy import UNSAFE_METHODS, UNSET, Policy

PROTECTED: Final = "idempotency_protected"
"""The attribute of what is protected inside: a function, or a class with the mixin."""

POLICY: Final = "idempotency_policy"
POLICIES: Final = "idempotency_policies"
INBOX: Final = "idempotency_inbox"
"""The attribute of a view that receives webhooks, and stores each of them once."""

BUILT_IN: Final = ("django.", "rest_framework.", "idempotency_django.")
"""The beginnings of modules that are not a project's."""

BY_DECORATOR: Final = "decorator"

ViewFunction = Callable[..., Any]


def view_class_of(view: Any) -> type | None:
    """The class that ``as_view()`` made the view of; its decorators carry it, too."""
    found = getattr(view, "cls", None) or getattr(view, "view_class", None)
    return found if isinstance(found, type) and issubclass(found, View) else None


def initkwargs_of(view: Any) -> dict[str, Any]:
    """The attributes that ``as_view()`` gives each instance of a class-based view."""
    given = getattr(view, "view_initkwargs", None) or getattr(view, "initkwargs", None)
    return given if isinstance(given, dict) else {}


def handlers_of(view: Any) -> dict[str, str]:
    """The unsafe methods that a class-based view handles, and the names of its handlers."""
    view_class, actions = view_class_of(view), getattr(view, "actions", None)
    own = getattr(view_class, "http_method_names", None)
    handled = initkwargs_of(view).get("http_method_names", own)
    names = {
        method: method.lower() if actions is None else actions.get(method.lower())
        for method in sorted(UNSAFE_METHODS)
        if not isinstance(handled, list | tuple | set | frozenset) or method.lower() in handled
    }
    return {method: name for method, name in names.items() if name and hasattr(view_class, name)}


def is_rest_framework(view_class: type) -> bool:
    """Whether a class is a view of REST framework."""
    return any(base.__module__ == "rest_framework.views" for base in view_class.__mro__)


def has_own_dispatch(view_class: Any) -> bool:
    """Whether a class of the project overrides ``dispatch()``, where it may do anything."""
    return not module_of(innermost(view_class.dispatch)).startswith(BUILT_IN)


def operations_of(view: Any) -> list[Any]:
    """The operations of a view of django-ninja; empty: it is another view."""
    if module_of(view) != "ninja.operation":
        return []
    return list(getattr(variables_of(view).get("self"), "operations", ()))


def part_for(view: Any, method: str) -> Any:
    """The view's part for one method: the function of django-ninja's operation, or all of it."""
    return next((each.view_func for each in operations_of(view) if method in each.methods), view)


def innermost(view: Any) -> Any:
    """The function below all decorators and partials that say what they wrap."""
    while True:
        inner = view.func if isinstance(view, partial) else vars_of(view).get("__wrapped__")
        if inner is None:
            return view
        view = inner


def variables_of(view: Any) -> dict[str, Any]:
    """The variables of a function's closure, by name."""
    if not isinstance(view, FunctionType):
        return {}
    contents = {}
    for name, cell in zip(view.__code__.co_freevars, view.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            contents[name] = cell.cell_contents
    return contents


def vars_of(view: Any) -> dict[str, Any]:
    """The attributes that an object has of its own."""
    return getattr(view, "__dict__", {})


def module_of(view: Any) -> str:
    """The module of a function's code, which ``functools.wraps`` cannot change."""
    names = getattr(view, "__globals__", None)
    return str(names.get("__name__", "") if names is not None else type(view).__module__)


def name_of(view: Any) -> str:
    """The dotted name of a view, for people; an ``@api_view`` has that of its function."""
    view_class = view if inspect.isclass(view) else view_class_of(view)
    if view_class is not None:
        return f"{view_class.__module__}.{view_class.__name__}"
    code = getattr(view, "__code__", None)  # whose name functools.wraps cannot change, either
    return f"{module_of(view)}.{code.co_qualname if code else type(view).__qualname__}"


def is_marked(view: Any, mark: str) -> bool:
    """Whether a view, or the class it was made of, carries a mark."""
    return bool(getattr(view, mark, False) or getattr(view_class_of(view), mark, False))


def policy_of(view: ViewFunction, method: str = "") -> Any:
    """The policy that a view declares, in ``idempotency_policy`` or ``idempotency_policies``.

    Args:
        view: what the URL leads to.
        method: of the request; without it, policies by action are not considered.

    Returns:
        The policy; ``None``: the view is not protected; ``UNSET``: it declares no policy.
    """
    view_class = view_class_of(view)
    given = initkwargs_of(view)
    declared = getattr(view, POLICY, UNSET)
    if declared is UNSET:
        declared = given.get(POLICY, getattr(view_class, POLICY, UNSET))
    policies = given.get(POLICIES, getattr(view_class, POLICIES, None))
    if policies and not isinstance(policies, Mapping):
        raise ImproperlyConfigured(
            f"idempotency_policies of {view!r} is a {type(policies).__name__}; it must be a "
            "dict of policies by action."
        )
    if policies and method:
        name = (getattr(view, "actions", None) or {}).get(method.lower(), method.lower())
        declared = policies.get(name, declared)
    return declared if declared is UNSET else checked(declared, view)


def checked(declared: Any, view: Any) -> Policy | None:
    """The policy that a view declares, unless it is something else.

    Raises:
        ImproperlyConfigured: it is neither a policy nor ``None``.
    """
    if declared is None or isinstance(declared, Policy):
        return declared
    raise ImproperlyConfigured(
        f"idempotency_policy of {view!r} is a {type(declared).__name__}; it must be a Policy or "
        "None."
    )


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
