"""How a view of any kind is protected: functions, class-based views, DRF's views.

Two places are possible. ``@idempotent`` protects what is below it. The middleware was not placed by
hand, so it protects a view from the inside: the innermost function is what runs once, and the
decorators around it (``login_required``, a rate limit) run for every request, before a replay.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, Final

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.module_loading import import_string
from django.views.generic import View

from .exchanges import ViewExchange, aanswer, answer
from .policy import Policy
from .transactions import (
    OwnedTransactions,
    RequestTransactions,
    asks_for_transaction,
    own,
    request_transactions,
)

PROTECTED: Final = "idempotency_protected"
EXEMPT: Final = "idempotency_exempt"

ViewFunction = Callable[..., Any]

_AS_VIEW_MODULES: Final = frozenset({"django.views.generic.base", "rest_framework.viewsets"})


def is_marked(view: Any, mark: str) -> bool:
    """Whether a view, or the class it was made of, carries a mark."""
    return bool(getattr(view, mark, False) or getattr(view_class_of(view), mark, False))


def view_class_of(view: Any) -> type | None:
    """The class that ``as_view()`` made the view of, if it did."""
    return getattr(view, "cls", None) or getattr(view, "view_class", None)


def is_async(view: Any) -> bool:
    """Whether the view is a coroutine function, or a class-based view of such."""
    view_class = view if inspect.isclass(view) else view_class_of(view)
    return iscoroutinefunction(view) or bool(getattr(view_class, "view_is_async", False))


def protect(view: Any, policy: Policy) -> Any:
    """Protect what ``@idempotent`` was put on: a function, a class, or what ``as_view()`` made.

    What is protected already stays as it is.
    """
    if is_marked(view, PROTECTED):
        return view
    if inspect.isclass(view):
        return _protected_class(view, policy)
    if view_class_of(view):
        protected = protect_innermost(view, policy)
        setattr(protected, PROTECTED, True)  # which decorators around as_view() would hide
        return protected
    for layer in _layers(view):
        if _module(layer) == "django.contrib.auth.decorators":
            raise ImproperlyConfigured(
                f"@idempotent is above an authentication decorator on {_name(view)}: stored "
                "answers would be replayed before the caller is checked. Put it below."
            )
    return _protected_function(view, policy)


def protect_innermost(view: ViewFunction, policy: Policy) -> ViewFunction:
    """The same view, of which the innermost function is protected and its decorators are not."""
    if inspect.ismethod(view):
        return MethodType(protect_innermost(view.__func__, policy), view.__self__)
    if _module(view) in _AS_VIEW_MODULES:
        return _protected_as_view(view, policy)
    inner = getattr(view, "__wrapped__", None)
    if inner is None:
        return _protected_function(view, policy)
    return _around(protect_innermost(inner, policy), view, inner)


def _around(protected: ViewFunction, decorated: ViewFunction, inner: ViewFunction) -> ViewFunction:
    """The decorated function again, with ``protected`` where its closure holds ``inner``."""
    closure = getattr(decorated, "__closure__", None) or ()
    cells = tuple(CellType(protected) if _holds(cell, inner) else cell for cell in closure)
    if not isinstance(decorated, FunctionType) or cells == closure:
        raise ImproperlyConfigured(
            f"The idempotency middleware cannot see through the decorator {_name(decorated)!r} of "
            f"a view to the function inside it. Put @idempotent on {_name(inner)!r} itself."
        )
    again = FunctionType(
        decorated.__code__, decorated.__globals__, decorated.__name__, decorated.__defaults__, cells
    )
    again.__kwdefaults__ = decorated.__kwdefaults__
    functools.update_wrapper(again, decorated)
    owned = getattr(protected, "_non_atomic_requests", None)
    if isinstance(owned, OwnedTransactions):  # Django asks the outermost function
        owned.update(iter(getattr(decorated, "_non_atomic_requests", ())))
        again._non_atomic_requests = owned  # type: ignore[attr-defined]
    return again


def _holds(cell: CellType, content: object) -> bool:
    try:
        return cell.cell_contents is content
    except ValueError:  # an empty cell
        return False


def _protected_as_view(view: Any, policy: Policy) -> ViewFunction:
    protected = _protected_class(view_class_of(view), policy)
    left_out = getattr(view, "_non_atomic_requests", ())
    if hasattr(view, "cls"):
        actions = getattr(view, "actions", None)
        made = protected.as_view(*([actions] if actions else []), **view.initkwargs)
    else:
        made = protected.as_view(**view.view_initkwargs)
    if hasattr(made, "_non_atomic_requests"):
        made._non_atomic_requests.update(left_out)
    return made  # type: ignore[no-any-return]  # as_view() of a class made here


def _protected_class(view_class: Any, policy: Policy) -> Any:
    if any(base.__module__ == "rest_framework.views" for base in view_class.__mro__):
        # Named by its path, so that Django's views do not need DRF to be installed.
        mixin = import_string("idempotency_django.drf.IdempotentViewMixin")
    elif issubclass(view_class, View):
        mixin = _ProtectedView
    else:
        raise ImproperlyConfigured(
            f"@idempotent is on {view_class.__qualname__}, which is no view."
        )
    body = {
        "__module__": view_class.__module__,
        "__qualname__": view_class.__qualname__,
        "__doc__": view_class.__doc__,
        "idempotency_policy": policy,
    }
    return type(view_class.__name__, (mixin, view_class), body)


class _ProtectedView:
    """Stands before a class-based view; its handler runs once, after what ``dispatch()`` checks."""

    idempotency_protected = True
    idempotency_policy: Policy
    # Given by as_view(), which is where Django's ATOMIC_REQUESTS is taken over.
    idempotency_left_out: OwnedTransactions | None = None
    _idempotency_transactions: RequestTransactions | None = None

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Any:
        if is_async(cls):  # which no transaction can span: Django says so
            return super().as_view(**initkwargs)  # type: ignore[misc]
        owned = OwnedTransactions()
        view = super().as_view(**initkwargs, idempotency_left_out=owned)  # type: ignore[misc]
        owned.update(iter(getattr(view, "_non_atomic_requests", ())))
        view._non_atomic_requests = owned
        return view

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if self.idempotency_left_out is None:
            return super().dispatch(request, *args, **kwargs)  # type: ignore[misc]
        with request_transactions(self.idempotency_left_out) as transactions:
            self._idempotency_transactions = transactions
            return super().dispatch(request, *args, **kwargs)  # type: ignore[misc]

    def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        super().setup(request, *args, **kwargs)  # type: ignore[misc]  # View's
        name = (request.method or "").lower()
        handler = getattr(self, name, None)
        if iscoroutinefunction(handler):
            setattr(self, name, _async(handler, self.idempotency_policy))
        elif handler is not None:
            setattr(self, name, functools.partial(self._serve_once, handler))

    def _serve_once(
        self, handler: ViewFunction, request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponseBase:
        run = functools.partial(handler, request, *args, **kwargs)
        exchange = ViewExchange(request, run, self)
        return answer(exchange, self.idempotency_policy, self._idempotency_transactions)


def _protected_function(view: ViewFunction, policy: Policy) -> ViewFunction:
    owner = _owner_of_async_dispatch(view)
    if owner is not None and asks_for_transaction(owner.dispatch):
        # method_decorator has decorated a stand-in that is not async, so Django does not know.
        raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")
    asynchronous = iscoroutinefunction(view) or owner is not None
    protected = _async(view, policy) if asynchronous else _sync(view, policy)
    setattr(protected, PROTECTED, True)
    return protected


def _owner_of_async_dispatch(view: ViewFunction) -> Any:
    """The async class whose ``dispatch()`` this is: a function that returns a coroutine."""
    method = getattr(view, "func", view)  # method_decorator makes a partial of it
    owner = type(getattr(method, "__self__", None))
    return owner if getattr(view, "__name__", "") == "dispatch" and is_async(owner) else None


def _sync(view: ViewFunction, policy: Policy) -> ViewFunction:
    @functools.wraps(view)
    def protected(*args: Any, **kwargs: Any) -> Any:
        request = _request_among(args)
        if not isinstance(request, HttpRequest):
            serve_within = import_string("idempotency_django.drf.serve_within")
            return serve_within(request, policy, functools.partial(view, *args, **kwargs))
        run = functools.partial(view, *args, **kwargs)
        exchange = ViewExchange(request, run, _instance_of(view, args))
        with request_transactions(owned) as transactions:
            return answer(exchange, policy, transactions)

    owned = own(protected)
    return protected


def _async(view: ViewFunction, policy: Policy) -> ViewFunction:
    # No transaction can span it, ATOMIC_REQUESTS's neither: what Django says of that holds here.
    @functools.wraps(view)
    async def protected(*args: Any, **kwargs: Any) -> Any:
        run = functools.partial(view, *args, **kwargs)
        exchange = ViewExchange(_request_among(args), run, _instance_of(view, args))
        return await aanswer(exchange, policy)

    return protected


def _request_among(args: tuple[Any, ...]) -> Any:
    """The request among a view's arguments, of which the first may be a method's ``self``."""
    is_request = isinstance(getattr(args[0], "_request", args[0]), HttpRequest)
    return args[0] if is_request else args[1]


def _instance_of(view: ViewFunction, args: tuple[Any, ...]) -> Any:
    """The class-based view whose method is called; ``None``: it is a function."""
    bound = getattr(view, "func", view)  # method_decorator makes a partial of a bound method
    owner = getattr(bound, "__self__", args[0])
    return owner if isinstance(owner, View) else None


def _layers(view: Any) -> Iterator[Any]:
    while view is not None:
        yield view
        view = getattr(view, "__wrapped__", None)


def _module(view: Any) -> str:
    """Where a function's code is from; ``functools.wraps`` cannot change that."""
    return str(getattr(view, "__globals__", {}).get("__name__", ""))


def _name(view: Any) -> str:
    return f"{_module(view) or type(view).__module__}.{getattr(view, '__qualname__', view)}"
