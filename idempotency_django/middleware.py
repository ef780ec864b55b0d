"""The middleware: protects the views of a project without touching them."""

from __future__ import annotations

import inspect
import logging
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
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from .engine.flows import finish
from .http.declared import (
    ViewFunction,
    is_covered,
    is_exempt,
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

logger = logging.getLogger("idempotency_django")

GetResponse = Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]


class IdempotencyMiddleware:
    """Middleware that protects views that are called with an unsafe method.

    ``IDEMPOTENCY["MIDDLEWARE_PROTECTS"]`` chooses the views; those that declare a policy are always
    among them. A view's policy is its ``idempotency_policy`` attribute (on the function or on the
    class), else the project's. The middleware leaves alone views that are protected inside, below
    any decorator, and those that are marked ``@idempotency_exempt``.

    It must be the last in ``MIDDLEWARE``, so that the checks of all others (CSRF, a required login)
    run first. It refuses to start in any other position.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: GetResponse) -> None:
        if not _is_last(get_response):
            raise ImproperlyConfigured(
                "IdempotencyMiddleware is not the last in MIDDLEWARE. It runs plain functions "
                "itself, without the checks of the middleware after it. Move it to the end of "
                "MIDDLEWARE, and remove it from everywhere else."
            )
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
        return finish(_processed(*given, asynchronous=False))

    async def _aprocess_view(self, *given: Any) -> Any:
        return await _processed(*given, asynchronous=True)


def _is_last(get_response: Any) -> bool:
    """Whether what a middleware calls is Django's handler, and no other middleware."""
    while not isinstance(getattr(get_response, "__self__", None), BaseHandler):
        get_response = vars_of(get_response).get("__wrapped__")  # Django's, or a tracer's
        if get_response is None:
            return False
    return True


async def _processed(
    request: HttpRequest, view: ViewFunction, args: Any, kwargs: Any, *, asynchronous: bool
) -> Any:
    """The response of a function that the middleware runs; ``None``: Django runs the view."""
    run: Any = _to_run(request, view)
    if run is None:
        return None
    try:
        run = BaseHandler().make_view_atomic(run)
        if asynchronous != iscoroutinefunction(run):
            run = sync_to_async(run) if asynchronous else async_to_sync(run)
        response = run(request, *args, **kwargs)
        return await response if asynchronous else response
    except Exception as error:  # noqa: BLE001  # raised again where Django expects it
        return _Raised(error, request)


class _Raised(HttpResponse):
    """Stands for the error of a view that the middleware has run.

    Django calls every ``process_exception`` for what a response raises as it is rendered, but not
    for what a ``process_view`` raises.
    """

    template_name = None

    def __init__(self, error: Exception, request: Any) -> None:
        super().__init__(status=500)
        self.context_data: dict[str, Any] = {}  # for a process_template_response
        self.error, self.request = error, request
        request._idempotency_raised = error

    def render(self) -> HttpResponseBase:
        self.request._idempotency_raised = None
        raise self.error


class _Mark(NamedTuple):
    """On a request: the class that handles it once, and the policy."""

    view_class: type
    policy: Policy


_MARK: Final = "_idempotency_mark"

_VIEW: Final = "_idempotency_view"
"""The attribute of a request with its view, if that is protected."""


def _to_run(request: HttpRequest, view: ViewFunction) -> ViewFunction | None:
    """What the middleware has to run in the place of the view; ``None``: Django runs the view."""
    method = request.method or ""
    part = part_for(view, method)
    if method not in UNSAFE_METHODS or is_exempt(view) or is_exempt(part):
        return None
    is_protected = protected_part(view, method) is not None
    policy = None if is_protected else _policy_for(request, part, method)
    if is_protected or policy is not None:
        setattr(request, _VIEW, view)
    if policy is None:
        return None
    view_class, problem = view_class_of(view), objection_to_view(view, method)
    if view_class is not None and not problem:
        setattr(request, _MARK, _Mark(view_class, policy))
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
        found = getattr(getattr(request, "_request", request), _MARK, None)
        if found is not None and found.view_class is view_class is type(self):
            replace_handler(self, request, found.policy)

    setattr(prepared, _MARK, view_class)
    setattr(view_class, name, prepared)


def _checked(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    """Log an error if a protected view, or what is around it, has responded without a claim."""
    error = getattr(request, "_idempotency_raised", None)
    if error is not None:  # a process_template_response has replaced it
        raise error
    view = getattr(request, _VIEW, None)
    if view is not None and not hasattr(request, "idempotency"):
        log_unclaimed(view, request, response)
    return response


async def _achecked(
    request: HttpRequest, response: Awaitable[HttpResponseBase]
) -> HttpResponseBase:
    return _checked(request, await response)
