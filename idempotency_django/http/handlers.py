"""The handler of a class-based view: in its place on the view stands what runs it once.

``dispatch()`` finds it there, after everything that it checks itself, in mixins and subclasses too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any, Final

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from ..policy.validators import UNSAFE_METHODS
from .inspection import kept, name_of
from .messages import key_header
from .opening import PROTECTED, opened

Serve = Callable[[Any, Callable[[], Any]], Any]

logger = logging.getLogger("idempotency_django")

_ONCE: Final = "_idempotency_once"
"""Where the function that stands in for a handler is kept with the handler's."""


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
    if request.method not in UNSAFE_METHODS:
        return
    name = request.method.lower()
    handler = getattr(view, name, None)
    before = getattr(view, "_idempotency_placed", None)
    if before is not None and handler is before[0]:
        handler = before[1]  # its own again: a loop around dispatch() runs the view anew
    if handler is None:
        return
    function = getattr(handler, "__func__", None)
    if function is not None and handler.__self__ is view:
        known = function.__dict__.get(_ONCE)
        if known is not None and known[0] is function:  # as kept() keeps it
            once = known[1]
        else:
            once = kept(function, _ONCE, partial(opened, function, _once))
        stand_in: Any = MethodType(once, view)
    else:
        stand_in = once = opened(handler, partial(_once, view=view))
    setattr(view, name, stand_in)
    view._idempotency_placed = (stand_in, handler)
    # One that is protected inside sees to its claim itself.
    view._idempotency_reached = hasattr(once, PROTECTED)


def _once(function: Any, view: Any = None) -> Any:
    """What stands in for a handler's innermost function."""
    if iscoroutinefunction(function):

        @wraps(function)
        async def aonce(*args: Any, **kwargs: Any) -> Any:
            instance, request = _reached(view, args)
            return await instance._idempotency_serve(request, partial(function, *args, **kwargs))

        return aonce

    @wraps(function)
    def once(*args: Any, **kwargs: Any) -> Any:
        instance, request = _reached(view, args)
        return instance._idempotency_serve(request, partial(function, *args, **kwargs))

    return once


def _reached(view: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """The view and its request: a method's arguments, or those of an ``@api_view`` function."""
    instance, request = (view or args[0]), args[0]
    if hasattr(instance, "_idempotency_serve"):
        request = request if view else args[1]
    else:
        instance = request.parser_context["view"]
    instance._idempotency_reached = True
    return instance, request


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
