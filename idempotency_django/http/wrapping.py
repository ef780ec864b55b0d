"""How a view of any kind is protected: functions, class-based views, DRF's views.

``@idempotent`` and the middleware protect a view in the same way, from the inside: the innermost
function runs once. The decorators around it (``login_required``, a rate limit) run for every
request, before a replay.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Final

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.http import HttpRequest
from django.views.generic import View

from ..policy import Policy
from ..stores.atomic_blocks import is_atomic
from .atomic_requests import (
    NONE,
    OwnedTransactions,
    asks_for_transaction,
    own,
    request_transactions,
)
from .declared import ViewFunction, is_async, is_marked, view_class_of
from .dispatching import NON_ATOMIC, answers_itself, dispatched, mixins, serve_once
from .frameworks import refuse_framework
from .inspection import is_as_view, name_of, with_variable
from .opening import POLICIES, POLICY, PROTECTED, opened
from .views import aanswer, answer

BY_DECORATOR: Final = "decorator"


def protect(view: Any, policy: Policy | None) -> Any:
    """Protect a view: a function, a class, or what ``as_view()`` made.

    Its innermost function runs once per operation. The decorators around that function run for
    every request, before a replay. What is already protected stays as it is.

    Args:
        view: the view.
        policy: its policy; ``None`` on a DRF view leaves it to ``idempotency_policies``.

    Raises:
        ImproperlyConfigured: it cannot be protected; the error says what to do.
    """
    refuse_framework(view)
    if not inspect.isclass(view):
        return opened(view, functools.partial(_protected, policy=policy))
    return view if is_marked(view, PROTECTED) else _protected_class(view, policy)


def _protected(function: Any, policy: Policy | None) -> Any:
    if is_marked(function, PROTECTED):
        return function
    if is_as_view(function):
        protected = _protected_as_view(function, policy)
    elif policy is None:
        return function
    elif function.__name__ == "dispatch":
        protected = _protected_dispatch(function, policy)
    else:
        make = _async if iscoroutinefunction(function) else _sync
        protected = make(function, policy)
    setattr(protected, PROTECTED, BY_DECORATOR)
    setattr(protected, POLICY, policy)
    return protected


def _protected_as_view(view: Any, policy: Policy | None) -> Any:
    """The function that ``as_view()`` made, of the protected class."""
    owned = None if is_async(view) else OwnedTransactions(getattr(view, NON_ATOMIC, ()))
    protected_class = _protected_class(view_class_of(view), policy, left_out=owned)
    again = with_variable(view, "cls", protected_class)
    setattr(again, "cls" if hasattr(view, "cls") else "view_class", protected_class)
    if owned is not None:
        setattr(again, NON_ATOMIC, owned)
    return again


def _protected_class(
    view_class: Any, policy: Policy | None, left_out: OwnedTransactions | None = None
) -> Any:
    mixin = next((mixin for base, mixin in mixins if issubclass(view_class, base)), None)
    if mixin is None:
        raise ImproperlyConfigured(
            f"@idempotent is on {name_of(view_class)}, which is not a view. Put it on a function, "
            "or on a class that is a View."
        )
    if answers_itself(view_class):
        raise ImproperlyConfigured(
            f"{name_of(view_class)} overrides dispatch() and has no post(), put(), patch() or "
            "delete() that could run once. If dispatch() checks nothing that a replay must "
            "check, put @idempotent on dispatch(). Otherwise leave the class unprotected with "
            "@idempotency_exempt."
        )
    body = {
        "__module__": view_class.__module__,
        "__qualname__": view_class.__qualname__,
        "__doc__": view_class.__doc__,
        PROTECTED: BY_DECORATOR,
        POLICY: policy,
        POLICIES: getattr(view_class, POLICIES, {}),  # which the mixin's own would hide
        "idempotency_left_out": left_out,
    }
    return type(view_class.__name__, (mixin, view_class), body)


def _protected_dispatch(dispatch: Any, policy: Policy) -> Any:
    """A ``dispatch()`` around a handler that runs once; one without handlers runs once itself."""
    whole = _async(dispatch, policy) if iscoroutinefunction(dispatch) else _sync(dispatch, policy)

    @functools.wraps(dispatch)
    def protected(view: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(view, View) or answers_itself(type(view)):
            return whole(view, *args, **kwargs)
        left_out = getattr(view.dispatch, NON_ATOMIC, None)
        if is_async(type(view)) and asks_for_transaction(view.dispatch):
            # method_decorator has decorated a stand-in that is not async, so Django does not know.
            raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")
        run = functools.partial(dispatch, view, *args, **kwargs)
        return dispatched(view, args[0], policy, left_out, run)

    own(protected)
    if iscoroutinefunction(dispatch):
        markcoroutinefunction(protected)
    return protected


def _sync(view: ViewFunction, policy: Policy) -> ViewFunction:
    @functools.wraps(view)
    def protected(*args: Any, **kwargs: Any) -> Any:
        request, run, instance = args[0], functools.partial(view, *args, **kwargs), None
        if not isinstance(request, HttpRequest):
            request, instance = _request_among(args), _instance_of(args)
            if not isinstance(request, HttpRequest):
                return serve_once(policy, None, None, request, run)
        if not any(map(is_atomic, connections.settings.values())):
            return answer(policy, NONE, instance, request, run)
        with request_transactions(owned) as transactions:
            return answer(policy, transactions, instance, request, run)

    owned = own(protected)
    return protected


def _async(view: ViewFunction, policy: Policy) -> ViewFunction:
    # No transaction can span it, ATOMIC_REQUESTS's neither: what Django says of that holds here.
    @functools.wraps(view)
    async def protected(*args: Any, **kwargs: Any) -> Any:
        run = functools.partial(view, *args, **kwargs)
        return await aanswer(policy, _instance_of(args), _request_among(args), run)

    return protected


def _request_among(args: tuple[Any, ...]) -> Any:
    """The request among a view's arguments, of which the first may be a method's ``self``."""
    is_request = isinstance(getattr(args[0], "_request", args[0]), HttpRequest)
    return args[0] if is_request else args[1]


def _instance_of(args: tuple[Any, ...]) -> View | None:
    """The class-based view whose method is called; ``None``: it is a function."""
    return args[0] if isinstance(args[0], View) else None
