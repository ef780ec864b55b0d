"""Class-based views whose handler runs once, after everything that their ``dispatch()`` checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.views.generic import View

from ..policy import Policy
from ..policy.validators import UNSAFE_METHODS
from .atomic_requests import OwnedTransactions, RequestTransactions, request_transactions
from .declared import is_async
from .handlers import ensure_reached, place
from .inspection import module_of
from .opening import innermost
from .serving import unclaimed
from .views import aanswer, answer

NON_ATOMIC: Final = "_non_atomic_requests"

ServeWithin = Callable[[Any, Policy, Callable[[], Any]], HttpResponseBase]

mixins: Final[list[tuple[type, type]]] = []
"""The bases of views, and what comes before each to protect it."""

servers: Final[list[tuple[type, ServeWithin]]] = []
"""The classes of requests that are not Django's, and what serves each."""


def add_framework(base: type, mixin: type, request: type, serve_within: ServeWithin) -> None:
    """Protect the views of another framework; called by its adapter.

    Args:
        base: the base class of its views.
        mixin: comes before a view class and protects it.
        request: the class of the requests that its handlers get.
        serve_within: serves such a request, whose view already runs, with a policy: it answers, or
            calls what runs the handler.
    """
    mixins.insert(0, (base, mixin))  # before Django's, which it may be derived from
    servers.append((request, serve_within))


def answers_itself(view_class: Any) -> bool:
    """Whether a class does the work of all unsafe methods in a ``dispatch()`` of its own."""
    if any(hasattr(view_class, method.lower()) for method in UNSAFE_METHODS):
        return False
    dispatch = innermost(view_class.dispatch)
    known = module_of(dispatch).startswith(("django.", "rest_framework.", "idempotency_django."))
    # One that checks something and passes on to super().dispatch() ends in a 405.
    return not known and "dispatch" not in getattr(dispatch, "__code__", dispatch).co_names


class ProtectedView:
    """Comes before a class-based view: its handler runs once, after what ``dispatch()`` checks."""

    idempotency_policy: Policy
    # Set by as_view(), which takes over Django's ATOMIC_REQUESTS.
    idempotency_left_out: OwnedTransactions | None = None

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Any:
        if is_async(cls):  # which no transaction can span: Django says so
            return super().as_view(**initkwargs)  # type: ignore[misc]
        owned = OwnedTransactions()
        view = super().as_view(**initkwargs, idempotency_left_out=owned)  # type: ignore[misc]
        owned.update(iter(getattr(view, NON_ATOMIC, ())))
        setattr(view, NON_ATOMIC, owned)
        return view

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(super().dispatch, request, *args, **kwargs)  # type: ignore[misc]
        return dispatched(self, request, self.idempotency_policy, self.idempotency_left_out, run)


def dispatched(
    view: Any,
    request: HttpRequest,
    policy: Policy,
    left_out: OwnedTransactions | None,
    run: Callable[[], Any],
) -> Any:
    """What ``dispatch()`` returns, of a view whose handler runs once."""
    unclaimed(request)
    if is_async(type(view)):
        place(view, request, functools.partial(aanswer, policy, view))
        return _achecked(view, request, run)
    transactions = None if left_out is None else request_transactions(left_out)
    view._idempotency_transactions = transactions
    place(view, request, functools.partial(serve_once, policy, transactions, view))
    with transactions if transactions and transactions.aliases else nullcontext():
        response = run()
    ensure_reached(view, request, response)
    return response


async def _achecked(view: Any, request: HttpRequest, run: Callable[[], Any]) -> Any:
    response = run()
    if inspect.isawaitable(response):  # what a mixin refuses is not
        response = await response
    ensure_reached(view, request, response)
    return response


def serve_once(
    policy: Policy,
    transactions: RequestTransactions | None,
    instance: View | None,
    request: Any,
    run: Callable[[], Any],
) -> HttpResponseBase:
    for request_class, serve in servers:
        if isinstance(request, request_class):
            return serve(request, policy, run)
    return answer(policy, transactions, instance, request, run)


mixins.append((View, ProtectedView))
