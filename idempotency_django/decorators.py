"""``@idempotent``, ``@idempotency_exempt`` and ``@part_of_view`` for views of any kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, Unpack, overload

from django.core.exceptions import ImproperlyConfigured

from .contrib.ninja import offer
from .http.unwrapping import (
    EXEMPT,
    PROTECTED,
    is_exempt,
    is_marked,
    mark_part_of_view,
    name_of,
    view_class_of,
)
from .http.wrapping import protect
from .policy import Policy, PolicyFields

ViewT = TypeVar("ViewT", bound=Callable[..., Any])


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

    Put it on function views, on ``@api_view`` functions (above or below ``@api_view``), on
    class-based views, on their handler methods or ``dispatch()``, on what ``as_view()`` returns, or
    on operations of django-ninja, below ``@api.post(…)``; sync or async. It is the innermost
    decorator: all others run for every request, before a replay. Decorators of Django and REST
    framework may be below it, too.

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
        ImproperlyConfigured: it is not on a view; the view is exempt or belongs to a framework
            without an adapter; or a decorator below it is not known. The error says what to do.
    """
    chosen = (policy or Policy()).replace(**fields) if fields else policy or Policy()
    if view is None:
        return lambda view: _protected(view, chosen)
    if isinstance(view, Policy):
        raise ImproperlyConfigured("Write @idempotent(policy=…): the policy is a keyword argument.")
    return _protected(view, chosen)


def idempotency_exempt(view: ViewT) -> ViewT:
    """Make the middleware leave a view alone: a function, a class, or what ``as_view()`` made.

    Raises:
        ImproperlyConfigured: the view is protected by ``@idempotent`` or by the mixin.
    """
    if is_marked(view, PROTECTED):
        raise _contradicted(view)
    setattr(view, EXEMPT, True)
    return view


def part_of_view(function: ViewT) -> ViewT:
    """Let a wrapper count as a part of its view, so that it can be protected from outside.

    It then runs once, together with the view, and **not before a replay**. So it must not check
    anything that a replay must check. Put it on what a decorator returns, below ``@idempotent``.
    """
    return mark_part_of_view(function)


def _protected(view: Any, policy: Policy) -> Any:
    if is_exempt(view):
        raise _contradicted(view)
    protected = protect(view, policy)
    offer(protected, policy)
    return protected


def _contradicted(view: Any) -> ImproperlyConfigured:
    text = f"{name_of(view)} is both protected and exempt. Remove either @idempotency_exempt or "
    if view_class_of(view) is None and not inspect.isclass(view):
        return ImproperlyConfigured(f"{text}@idempotent.")
    return ImproperlyConfigured(
        f"{text}the protection (@idempotent, the mixin). To leave out a class with the mixin, set "
        "idempotency_policy = None."
    )
