"""``@idempotent`` and ``@idempotency_exempt`` for views of any kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from django.core.exceptions import ImproperlyConfigured

from .policy import Policy
from .protection import EXEMPT, protect

ViewT = TypeVar("ViewT", bound=Callable[..., Any])


@overload
def idempotent(view: ViewT, /) -> ViewT: ...


@overload
def idempotent(*, policy: Policy = ..., **fields: Any) -> Callable[[ViewT], ViewT]: ...


def idempotent(view: Any = None, /, *, policy: Policy | None = None, **fields: Any) -> Any:
    """Make a view safe to retry.

    It goes on function views, on ``@api_view`` functions (above or below ``@api_view``), on
    class-based views, on their handler methods, and on what ``as_view()`` returns, sync or async.
    Below ``@login_required`` and its like: a replay must not be given before the caller is checked.

    ::

        @login_required
        @idempotent(required=True, ttl=timedelta(days=7))
        def order(request): ...

    Args:
        view: the view, when the decorator is used without parentheses.
        policy: the view's policy.
        fields: fields of :class:`~idempotency_django.policy.Policy`, instead of or on top of
            ``policy``.

    Raises:
        ImproperlyConfigured: what it is on is no view, or an authentication decorator.
    """
    chosen = (policy or Policy()).replace(**fields) if fields else policy or Policy()
    if view is None:
        return lambda view: protect(view, chosen)
    if isinstance(view, Policy):
        raise ImproperlyConfigured("Write @idempotent(policy=…): the policy is a keyword argument.")
    return protect(view, chosen)


def idempotency_exempt(view: ViewT) -> ViewT:
    """Make the middleware leave a view alone: a function, a class, or what ``as_view()`` made."""
    setattr(view, EXEMPT, True)
    return view
