"""What a view says of itself: its class, its marks, whether it is async, and its policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured

from ..policy import UNSET, Policy
from .opening import POLICIES, POLICY, vars_of, view_class_of

EXEMPT: Final = "idempotency_exempt"

ViewFunction = Callable[..., Any]


def is_marked(view: Any, mark: str) -> bool:
    """Whether a view, or the class it was made of, carries a mark."""
    return bool(getattr(view, mark, False) or getattr(view_class_of(view), mark, False))


def is_exempt(view: Any) -> bool:
    """Whether ``@idempotency_exempt`` is on a view or its class; a base's is on that base alone."""
    return EXEMPT in vars_of(view) or EXEMPT in vars_of(view_class_of(view))


def is_async(view: Any) -> bool:
    """Whether the view is a coroutine function, or a class-based view of coroutine functions."""
    view_class = view if inspect.isclass(view) else view_class_of(view)
    return iscoroutinefunction(view) or bool(getattr(view_class, "view_is_async", False))


def policy_of(view: ViewFunction, method: str = "") -> Any:
    """The policy that a view declares, in ``idempotency_policy`` or ``idempotency_policies``.

    Args:
        view: what the URL leads to.
        method: of the request; without it, policies by action are not considered.

    Returns:
        The policy; ``None``: the view is not protected; ``UNSET``: it declares no policy.
    """
    view_class = view_class_of(view)
    declared = getattr(view, POLICY, UNSET)
    if declared is UNSET:
        declared = getattr(view_class, POLICY, UNSET)
    policies = getattr(view_class, POLICIES, None)
    if policies and method:
        name = (getattr(view, "actions", None) or {}).get(method.lower(), method.lower())
        declared = policies.get(name, declared)
    if declared is UNSET or declared is None or isinstance(declared, Policy):
        return declared
    raise ImproperlyConfigured(
        f"idempotency_policy of {view!r} is a {type(declared).__name__}; it must be a Policy or "
        "None."
    )
