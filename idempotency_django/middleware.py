"""The middleware: protects the views of a project without touching them."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any, Final, NamedTuple

from asgiref.sync import (
    async_to_sync,
    iscoroutinefunction,
    markcoroutinefunction,
    sync_to_async,
)
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.base import BaseHandler
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from .engine.flows import finish
from .http.declared import (
    ViewFunction,
    is_covered,
    is_rest_framework,
    part_for,
    policy_of,
    vars_of,
    view_class_of,
)
from .http.rule import objection_to_view, protected_part
from .http.serving import log_unread_field
from .http.wrapping import has_key, log_unclaimed, protect, refuse_key, replace_handler
from .policy import INHERITED, UNSAFE_METHODS, UNSET, Policy

GetResponse = Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]


class IdempotencyMiddleware:
    """Middleware that protects views that are called with an unsafe method.

    ``IDEMPOTENCY["MIDDLEWARE_PROTECTS"]`` chooses the views; those that declare a policy are always
    among them. A view's policy is its ``idempotency_policy`` attribute (on the function or on the
    class), else the project's. The middleware leaves alone views that are protected inside, and
    those whose policy is ``None``, as with ``@idempotency_exempt``.

    It must be the last in ``MIDDLEWARE``, so that the checks of all others (CSRF, a required login)
    run first. It refuses to start in any other position.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: GetResponse) -> None:
        self.handler = _handler_of(get_response)
        self.get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)
            # Django calls this one directly. It would run the sync one in a thread, even for
            # requests that the middleware leaves alone.
            self.process_view = self._aprocess_view  # type: ignore[method-assign]

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        response = self.get_response(request)
        if inspect.isawaitable(response):
            return _achecked(request, response)
        return _checked(request, response)

    def process_view(self, *given: Any) -> Any:
        """Mark a request for the class of its view, which Django calls as usual.

        A plain function is run here, as Django would run it.
        """
        return finish(self._processed(*given, asynchronous=False))

    async def _aprocess_view(self, *given: Any) -> Any:
        return await self._processed(*given, asynchronous=True)

    async def _processed(
        self,
        request: HttpRequest,
        view: ViewFunction,
        args: Any,
        kwargs: Any,
        *,
        asynchronous: bool,
    ) -> Any:
        """The response of a function that the middleware runs; ``None``: Django runs the view."""
        run: Any = _to_run(request, view)
        if run is None:
            return None
        run = self.handler.make_view_atomic(run)
        if asynchronous != iscoroutinefunction(run):
            run = sync_to_async(run) if asynchronous else async_to_sync(run)
        try:
            response = run(request, *args, **kwargs)
            return await response if asynchronous else response
        except Exception as error:
            # Django asks every process_exception for what a view raises, not for this.
            handle: Any = self.handler.process_exception_by_middleware
            handle = sync_to_async(handle) if asynchronous else handle
            response = handle(error, request)
            response = await response if asynchronous else response
            if response is None:
                raise
            return response


def _handler_of(get_response: Any) -> BaseHandler:
    """Django's handler, which the last middleware calls.

    Raises:
        ImproperlyConfigured: it is another middleware that is called.
    """
    inner = get_response
    while inner is not None:
        handler = getattr(inner, "__self__", None)
        if isinstance(handler, BaseHandler):
            return handler
        inner = vars_of(inner).get("__wrapped__")  # Django's, or a tracer's
    raise ImproperlyConfigured(
        "IdempotencyMiddleware is not the last in MIDDLEWARE. It runs plain functions itself, "
        "without the checks of the middleware after it. Move it to the end of MIDDLEWARE, and "
        "remove it from everywhere else."
    )


class _Mark(NamedTuple):
    """On a request: its view, and the policy that its class is held to, if not by the view."""

    view: ViewFunction
    policy: Policy | None


_MARK: Final = "_idempotency_mark"


def _to_run(request: HttpRequest, view: ViewFunction) -> ViewFunction | None:
    """What the middleware has to run in the place of the view; ``None``: Django runs the view."""
    method = request.method or ""
    if method not in UNSAFE_METHODS:
        return None
    if protected_part(view, method) is not None:
        setattr(request, _MARK, _Mark(view, None))
        return None
    policy = _policy_for(request, part_for(view, method), method)
    if policy is None:
        return None
    setattr(request, _MARK, _Mark(view, policy))
    view_class, problem = view_class_of(view), objection_to_view(view, method)
    if view_class is not None and not problem:
        _look_for_marks(view_class)
        return None
    if has_key(request, policy):
        return partial(refuse_key, view, problem) if problem else protect(view, policy)
    request.idempotency = getattr(request, "idempotency", None)  # type: ignore[attr-defined]
    log_unread_field(request)
    return None


def _policy_for(request: HttpRequest, view: ViewFunction, method: str) -> Policy | None:
    """The policy of a view, or the project's, if the middleware protects the view."""
    declared: Policy | None = policy_of(view, method)
    if declared is not UNSET:
        return declared and declared.resolved()
    match = request.resolver_match
    is_chosen = is_covered(request.path_info, match.namespaces if match else [])
    return INHERITED.resolved() if is_chosen else None


def _look_for_marks(view_class: Any) -> None:
    """Let a class replace the handler of a marked request, after all that its ``setup()`` or
    ``initial()`` does.

    Django calls the view, with its decorators. So their checks, and those of ``dispatch()``, come
    before the handler.
    """
    name = "initial" if is_rest_framework(view_class) else "setup"
    own = vars(view_class).get(name)
    if getattr(own, _MARK, None) is view_class:
        return

    @wraps(own or getattr(view_class, name))
    def prepared(self: Any, *args: Any, **kwargs: Any) -> None:
        if own is not None:
            own(self, *args, **kwargs)
        else:  # which may be another one in a subclass with further bases
            getattr(super(view_class, self), name)(*args, **kwargs)
        request = getattr(self, "request", None)
        mark: _Mark | None = getattr(getattr(request, "_request", request), _MARK, None)
        if mark is None or mark.policy is None:
            return
        if view_class_of(mark.view) is view_class is type(self):
            replace_handler(self, request, mark.policy)

    setattr(prepared, _MARK, view_class)
    setattr(view_class, name, prepared)


def _checked(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    """Log an error if a protected view, or what is around it, has responded without a claim."""
    mark = getattr(request, _MARK, None)
    if mark is not None and not hasattr(request, "idempotency"):
        log_unclaimed(mark.view, request, response)
    return response


async def _achecked(
    request: HttpRequest, response: Awaitable[HttpResponseBase]
) -> HttpResponseBase:
    return _checked(request, await response)
