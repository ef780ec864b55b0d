"""Runs a function once per operation: a view, a method, or the handler of a class-based view.

Each request to it is served by the adapter of its framework. In the place of a handler stands what
runs it once, on the instance of the view, where ``dispatch()`` finds it after everything that it
checks itself, in mixins and subclasses too.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Final

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.exceptions import (
    BadRequest,
    PermissionDenied,
    SuspiciousOperation,
)
from django.core.handlers.exception import response_for_exception
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.views.generic import View

from ..errors import KeyUnsupported
from ..policy import UNSAFE_METHODS, Policy
from ..stores.records import Record
from .declared import BY_DECORATOR, POLICY, PROTECTED, ViewFunction, name_of
from .invocations import key_header
from .replays import check_object
from .responses import marked, problem_response, render
from .rule import objection_to_method, own_function, protected_function, remembered_protection
from .serving import Adapter, aserve, serve

_HTTP_ERRORS: Final = (Http404, PermissionDenied, SuspiciousOperation, BadRequest)


class ViewAdapter(Adapter):
    """One request to a view that returns a response.

    Args:
        request: the request.
        run: runs the view.
        instance: the class-based view whose handler it is, where it is one.
    """

    def __init__(self, request: HttpRequest, run: Callable[[], Any], instance: Any = None) -> None:
        self.http_request = self.request = request
        self.method = request.method or ""
        self.run = run
        self._instance = instance

    def authorize(self, record: Record) -> None:
        super().authorize(record)
        if self._instance is not None:
            check_object(self._instance, record)

    def respond(self) -> HttpResponseBase:
        # A template is rendered here, inside the transaction, because its output is stored.
        return render(self.run(), self.http_request)

    async def arespond(self) -> HttpResponseBase:
        return await sync_to_async(render)(await self.run(), self.http_request)

    def recover(self, error: Exception) -> HttpResponseBase:
        if self.policy.should_store and isinstance(error, _HTTP_ERRORS):
            return response_for_exception(self.http_request, error)
        raise error


ADAPTER: Final = "_idempotency_adapter"
"""The attribute of a request with the :class:`ViewAdapter` of a framework of functions."""

MakeAdapter = Callable[[Any, Callable[[], Any], Any], Adapter]

logger = logging.getLogger("idempotency_django")

adapters: Final[list[tuple[type, MakeAdapter]]] = []
"""Of other frameworks: the class of the requests that their handlers get, and what makes the
adapter of one, with the arguments of :class:`ViewAdapter`.
"""


def protect(view: ViewFunction, policy: Policy) -> ViewFunction:
    """The function that runs a view, a method or a handler once per operation."""
    served = _stand_in(view, policy, is_async=iscoroutinefunction(view))
    made: Any = functools.update_wrapper(served, view)
    setattr(made, POLICY, policy)
    return made  # type: ignore[no-any-return]


def _stand_in(
    view: ViewFunction, policy: Policy, *, is_async: bool, instance: View | None = None
) -> ViewFunction:
    """What serves the requests to a view.

    Args:
        view: the view.
        policy: the view's policy.
        is_async: whether it is a coroutine function.
        instance: the class-based view that ``view`` is a bound handler of.
    """

    def adapter_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Adapter:
        run = functools.partial(view, *args, **kwargs)
        request = args[0] if instance else _request_among(args, kwargs)
        owner = args[0] if args and isinstance(args[0], View) else instance
        for request_class, make in adapters:
            if isinstance(request, request_class):
                return make(request, run, owner)
        made: Adapter = getattr(request, ADAPTER, ViewAdapter)(request, run, owner)
        return made

    def protected(*args: Any, **kwargs: Any) -> Any:
        return serve(adapter_for(args, kwargs), policy)

    async def aprotected(*args: Any, **kwargs: Any) -> Any:
        return await aserve(adapter_for(args, kwargs), policy)

    stand_in = aprotected if is_async else protected
    setattr(stand_in, PROTECTED, BY_DECORATOR)
    return stand_in


def _request_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The request among a view's arguments, of which the first may be a method's ``self``."""
    for given in (*args[:2], kwargs.get("request")):
        if isinstance(getattr(given, "_request", given), HttpRequest):
            return given
    raise TypeError(
        "A view with @idempotent was called without a request. Pass the request as the first "
        "argument, or as request=."
    )


# The handler of a class-based view.


_is_coroutine_function = functools.lru_cache(maxsize=1024)(iscoroutinefunction)


def replace_handler(view: Any, request: Any, policy: Policy) -> None:
    """Replace the request's handler with one that runs it once; one that does so itself stays.

    Args:
        view: the instance of a class-based view that handles this request.
        request: the request.
        policy: the policy of this request.

    If the handler cannot run once, a request with a key is refused.
    """
    name = getattr(request, "_request", request).method.lower()
    handler = getattr(view, name, None)
    action = (getattr(view, "action_map", None) or {}).get(name, name)  # of a viewset
    if handler is None:
        return
    function = own_function(view, handler)
    if remembered_protection(function) if function else protected_function(handler):
        return
    view_class: Any = type(view)
    problem = objection_to_method(view_class, action, function)
    is_async = _is_coroutine_function(function) if function else iscoroutinefunction(handler)
    if not problem:
        setattr(view, name, _stand_in(handler, policy, is_async=is_async, instance=view))
    elif has_key(request, policy):
        refuse = functools.partial(refuse_key, view_class, problem)
        setattr(view, name, sync_to_async(refuse) if is_async else refuse)


def has_key(request: Any, policy: Policy) -> bool:
    """Whether a request has a key, may have one that nothing here can see, or needs one."""
    policy = policy.resolved()
    in_header = key_header(request) is not None
    return in_header or bool(policy.key) or policy.requires_key(request.method)


def refuse_key(view: Any, problem: str, request: Any, *_: Any, **__: Any) -> HttpResponseBase:
    """The refusal of a key that a view cannot honour; nothing is executed."""
    logger.error(
        "%s %s was refused, because %s cannot be protected: %s",
        request.method,
        request.path,
        name_of(view),
        problem,
    )
    error = KeyUnsupported()
    return marked(problem_response(error), error)


def log_unclaimed(view: Any, request: HttpRequest, response: HttpResponseBase) -> None:
    """Log an error if a protected view responded successfully without calling its handler.

    It is called where nothing has set ``request.idempotency``.
    """
    succeeded = request.method in UNSAFE_METHODS and 200 <= response.status_code < 300
    if succeeded and key_header(request) is not None:
        logger.error(
            "%s is not protected: it responded to %s %s with %s without calling the protected "
            "handler. Put @idempotent on the function that does the work.",
            name_of(view),
            request.method,
            request.path,
            response.status_code,
        )
