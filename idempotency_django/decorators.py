"""``@idempotent`` and ``@idempotency_exempt``, for views of any kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar, Unpack, overload

from django.core.exceptions import ImproperlyConfigured

from .http.declared import BY_DECORATOR, POLICY, PROTECTED, name_of
from .http.rule import objection_to
from .http.wrapping import protect
from .policy import Policy, PolicyFields

ViewT = TypeVar("ViewT", bound=Callable[..., Any])

on_protected: Final[list[Callable[[Any, Policy], None]]] = []
"""Called with each function that ``@idempotent`` has protected, and its policy.

A framework that makes more than a view of a function adds what it needs, as django-ninja's adapter
does.
"""


@overload
def idempotent(view: ViewT, /) -> ViewT: ...


@overload
def idempotent(
    *, policy: Policy = ..., **fields: Unpack[PolicyFields]
) -> Callable[[ViewT], ViewT]: ...


def idempotent(
    view: Any = None, /, *, policy: Policy | None = None, **fields: Unpack[PolicyFields]
) -> Any:
    """Make a view safe to retry.

    Put it directly above the function that does the work: a function view, the method of a
    class-based view, the function of an ``@api_view``, or an operation of django-ninja; sync or
    async. What stands above it (``@login_required``, ``@api_view``, ``@api.post(…)``) runs on every
    request, before a replay. What stands below runs once, with the function.

    ::

        @login_required
        @idempotent(required=True, ttl=timedelta(days=7))
        def order(request): ...

    Args:
        view: the view, when the decorator is used without parentheses.
        policy: the view's policy.
        fields: fields of :class:`~idempotency_django.policy.Policy`, instead of ``policy`` or in
            addition to it.

    Raises:
        ImproperlyConfigured: it is not directly above a function, so a check of the caller could
            be below it; or the view is protected already. The error says what to do.
    """
    chosen = (policy or Policy()).replace(**fields) if fields else policy or Policy()
    if view is None:
        return partial(idempotent, policy=chosen)
    if getattr(view, PROTECTED, None) == BY_DECORATOR:
        raise ImproperlyConfigured(
            f"{name_of(view)} is protected already, so the policy of a second @idempotent would "
            "count for nothing. Give the first one all fields."
        )
    if hasattr(view, "_ninja_operation"):  # also where nothing has registered the adapter
        raise ImproperlyConfigured(
            f"@idempotent is above the decorator that makes {name_of(view)} an operation of "
            "django-ninja, which would call the unprotected function. Put @idempotent directly on "
            "the function, below @api.post(…)."
        )
    if problem := objection_to(view):
        raise ImproperlyConfigured(problem)
    protected: Any = protect(view, chosen)
    for prepare in on_protected:
        prepare(protected, chosen)
    return protected


def idempotency_exempt(view: ViewT) -> ViewT:
    """Make the middleware leave a view alone: a function, a class, or what ``as_view()`` made.

    It sets the view's ``idempotency_policy`` to ``None``, which subclasses inherit.

    Raises:
        ImproperlyConfigured: ``@idempotent`` is on the function.
    """
    if getattr(view, PROTECTED, None) == BY_DECORATOR:
        raise ImproperlyConfigured(
            f"{name_of(view)} is both protected and exempt. Remove either @idempotency_exempt or "
            "@idempotent."
        )
    setattr(view, POLICY, None)
    return view
