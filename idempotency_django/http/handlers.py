"""The handler of a class-based view: in its place on the view stands what runs it once.

``dispatch()`` finds it there, after everything that it checks itself, in mixins and subclasses too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from ..policy.validators import UNSAFE_METHODS
from .inspection import kept, name_of
from .messages import key_header
from .opening import PROTECTED, opened

Serve = Callable[[Any, Callable[[], Any]], Any]

logger = logging.getLogger("idempotency_django")


def place(view: Any, request: HttpRequest, serve: Serve) -> None:
    """Replace the request's handler with one that lets ``serve`` run it.

    Decorators on the handler run for every request. A handler that is protected already stays.

    Args:
        view: the instance of a class-based view that answers this request.
        request: the request.
        serve: called with the request, as the handler gets it, and what runs the handler.

    Raises:
        ImproperlyConfigured: the handler has a decorator that is not known.
    """
    view._idempotency_serve = serve
    name = (request.method or "").lower()
    handler = _handler_of(view, name)
    if request.method not in UNSAFE_METHODS or handler is None:
        return
    function = getattr(handler, "__func__", None)
    if function is not None and handler.__self__ is view:
        once = kept(function, "_idempotency_once", lambda: opened(function, _once))
        stand_in: Any = MethodType(once, view)
    else:
        stand_in = once = opened(handler, partial(_once, view=view))
    setattr(view, name, stand_in)
    view._idempotency_placed = (stand_in, handler)
    # One that is protected inside sees to its claim itself.
    view._idempotency_reached = hasattr(once, PROTECTED)


def _handler_of(view: Any, name: str) -> Any:
    """The view's handler; its own again, where a loop around ``dispatch()`` runs the view anew."""
    handler = getattr(view, name, None)
    stand_in, own = getattr(view, "_idempotency_placed", (None, None))
    return own if handler is not None and handler is stand_in else handler


def _once(function: Any, view: Any = None) -> Any:
    """What stands in for a handler's innermost function."""

    def serve(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        instance, request = (view, args[0]) if view else _view_and_request(args)
        instance._idempotency_reached = True
        return instance._idempotency_serve(request, partial(function, *args, **kwargs))

    if iscoroutinefunction(function):

        @wraps(function)
        async def aonce(*args: Any, **kwargs: Any) -> Any:
            return await serve(args, kwargs)

        return aonce

    @wraps(function)
    def once(*args: Any, **kwargs: Any) -> Any:
        return serve(args, kwargs)

    return once


def _view_and_request(args: tuple[Any, ...]) -> tuple[Any, Any]:
    """The view and its request: a method's arguments, or those of an ``@api_view`` function."""
    first = args[0]
    if hasattr(first, "_idempotency_serve"):
        return first, args[1]
    return first.parser_context["view"], first


def ensure_reached(view: Any, request: HttpRequest, response: HttpResponseBase) -> None:
    """Log an error if a request with a key succeeded and its handler was never called."""
    if not getattr(view, "_idempotency_reached", False):
        ensure_claimed(type(view), request, response)


def ensure_claimed(view: Any, request: HttpRequest, response: HttpResponseBase) -> None:
    """Log an error if a protected view answered without a claim, and successfully."""
    keyed = request.method in UNSAFE_METHODS and key_header(request) is not None
    if keyed and 200 <= response.status_code < 300:
        logger.error(
            "%s is not protected: it answered %s %s with %s without calling the handler that "
            "runs once. Put @idempotent on the function that does the work.",
            name_of(view),
            request.method,
            request.path,
            response.status_code,
        )
