"""The middleware: protects the views of a project without touching them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from functools import cached_property, partial
from typing import Any

from asgiref.sync import (
    async_to_sync,
    iscoroutinefunction,
    markcoroutinefunction,
    sync_to_async,
)
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.base import BaseHandler
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.module_loading import import_string

from .conf import conf
from .errors import KeyUnsupported
from .http.marking import FAILED, mark
from .http.messages import PLANNED, key_header, mark_refusal, problem_response
from .http.routes import is_covered
from .http.serving import log_unread_field
from .http.unwrapping import (
    ViewFunction,
    cached_on,
    handlers_of,
    innermost,
    is_async,
    is_exempt,
    name_of,
    operations_of,
    part_for,
    policy_of,
    protected_part,
    transactions_around,
    view_class_of,
)
from .http.wrapping import log_unclaimed, protect, validate_handler
from .policy import (
    PROJECT_POLICY,
    UNSAFE_METHODS,
    UNSET,
    keys,
    resolve,
)

logger = logging.getLogger("idempotency_django")

GetResponse = Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]


class IdempotencyMiddleware:
    """Middleware that protects views that are called with an unsafe method.

    ``IDEMPOTENCY["MIDDLEWARE_PROTECTS"]`` chooses the views; those that declare a policy are always
    among them. A view's policy is its ``idempotency_policy`` attribute (on the function or on the
    class), else the project's. The middleware leaves alone views that are protected inside, below
    any decorator, and those that are marked ``@idempotency_exempt``.

    It must come after every middleware that has a ``process_view``, so that their checks (CSRF, a
    required login) run first. It refuses to start in any other position.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: GetResponse) -> None:
        validate_order()
        self.get_response = get_response
        self._handler = _loading_handler()
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

    def process_view(
        self,
        request: HttpRequest,
        view: ViewFunction,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the view with protection, if it has a policy; otherwise Django runs it as usual."""
        known = self._to_protect(request, view)
        if known is None:
            return None
        try:
            protected = known.protected(request)
        except ImproperlyConfigured as error:
            return _refuse_key(request, known, error)
        if known.is_async:  # under WSGI, where Django calls it likewise
            protected = async_to_sync(protected)
        else:  # as Django calls it, under ATOMIC_REQUESTS
            protected = BaseHandler().make_view_atomic(protected)
        try:
            return protected(request, *args, **kwargs)
        except Exception as error:
            response = self._response_to_error(error, request)
            if response is None:
                raise
            return response

    async def _aprocess_view(
        self,
        request: HttpRequest,
        view: ViewFunction,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        known = self._to_protect(request, view)
        if known is None:
            return None
        if not known.is_async:
            process_view = partial(IdempotencyMiddleware.process_view, self)
            return await sync_to_async(process_view)(request, view, args, kwargs)
        try:
            protected = known.protected(request)
        except ImproperlyConfigured as error:
            return _refuse_key(request, known, error)
        try:
            return await protected(request, *args, **kwargs)
        except Exception as error:
            response = await sync_to_async(self._response_to_error)(error, request)
            if response is None:
                raise
            return response

    def _to_protect(self, request: HttpRequest, view: ViewFunction) -> _ViewFacts | None:
        """The view, if this request runs with protection."""
        method = request.method or ""
        if method not in UNSAFE_METHODS:
            return None
        known = _facts_of(view)
        if known.is_exempt or (known.is_async and transactions_around(view)):
            return None  # Django refuses to run the latter, and says why
        is_inside, declared = known.knows(method)
        if is_inside:
            request._idempotency_view = view  # type: ignore[attr-defined]
        match = request.resolver_match
        namespaces = match.namespaces if match else []
        if declared is None or (
            declared is UNSET and not is_covered(request.path_info, namespaces)
        ):
            return None
        policy = resolve(PROJECT_POLICY if declared is UNSET else declared)
        has_key = keys.reads_header(policy.key) and (
            # Whether the view finds a key elsewhere is known in the protected view.
            known.finds_key or key_header(request) is not None
        )
        if not (has_key or policy.key or policy.requires_key(method)):
            log_unread_field(request)
            return None
        request._idempotency_view = view  # type: ignore[attr-defined]
        return known

    def _response_to_error(self, error: Exception, request: HttpRequest) -> HttpResponseBase | None:
        """The response of a ``process_exception`` of any middleware to what the view raised.

        Django calls them for what a view raises, but not for what a ``process_view`` raises.
        """
        if self._handler is None:
            return None
        return self._handler.process_exception_by_middleware(error, request)  # type: ignore[no-any-return]


class _ViewFacts:
    """The facts about a view that the middleware looks up once.

    Args:
        view: what the URL leads to.
    """

    def __init__(self, view: ViewFunction) -> None:
        self.view = view
        self.is_exempt = is_exempt(view)
        self.is_async = is_async(view)
        self.finds_key = hasattr(view_class_of(view), "get_idempotency_key")
        self.methods: dict[str, tuple[bool, Any]] = {}  # a cache
        self._validated: set[str] = set()

    def knows(self, method: str) -> tuple[bool, Any]:
        """:meth:`look_at`, once for each method."""
        if method not in self.methods:
            self.methods[method] = self.look_at(method)
        return self.methods[method]

    def look_at(self, method: str) -> tuple[bool, Any]:
        """Whether a method is protected inside, and its policy; ``None``: it takes no part."""
        part = part_for(self.view, method)
        if part is self.view and operations_of(part):
            return False, None  # django-ninja says that it has no such method
        if protected_part(part, method) is not None:
            return True, None
        return False, None if is_exempt(part) else policy_of(part, method)

    def protected(self, request: HttpRequest) -> Any:
        """The view with its innermost function protected.

        Raises:
            ImproperlyConfigured: the view, or its handler of the request, cannot be protected.
        """
        handlers = {} if view_class_of(self.view) is None else handlers_of(self.view)
        if request.method in handlers and request.method not in self._validated:
            validate_handler(view_class_of(self.view), handlers[request.method])
            self._validated.add(request.method)
        return self._protected

    @cached_property
    def _protected(self) -> Any:
        declared = policy_of(self.view)
        return protect(self.view, PROJECT_POLICY if declared is UNSET else declared)


def _facts_of(view: ViewFunction) -> _ViewFacts:
    facts: _ViewFacts = cached_on(view, "_idempotency_in_middleware", partial(_ViewFacts, view))
    return facts


def _refuse_key(
    request: HttpRequest, known: _ViewFacts, problem: ImproperlyConfigured
) -> HttpResponseBase:
    """The refusal of a key that a view cannot honour. Without a key, the problem is raised."""
    if key_header(request) is None:
        raise problem
    logger.error(
        "%s refuses requests with a key, because it cannot be protected: %s",
        name_of(innermost(known.view)),
        problem,
    )
    error = KeyUnsupported()
    response = problem_response(error)
    mark_refusal(response, request, error)
    return response


def _loading_handler() -> Any:
    """Django's handler that is loading its middleware now; ``None``: ours was made by hand.

    It knows the other middleware, and Django passes it to none of them.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "load_middleware":
            handler = frame.f_locals.get("self")
            if isinstance(handler, BaseHandler):
                return handler
        frame = frame.f_back
    return None


def validate_order() -> None:
    """Refuse a position before a middleware whose ``process_view`` would be skipped.

    Raises:
        ImproperlyConfigured: there are such middleware; the error names them.
    """
    skipped = skipped_middleware()
    if skipped:
        raise ImproperlyConfigured(
            "IdempotencyMiddleware runs views itself and would skip the process_view of the "
            f"middleware after it: {', '.join(skipped)}. Move IdempotencyMiddleware after it in "
            "MIDDLEWARE."
        )


def skipped_middleware() -> list[str]:
    """The middleware after this one in ``MIDDLEWARE`` that have a ``process_view``."""
    ours = f"{IdempotencyMiddleware.__module__}.{IdempotencyMiddleware.__qualname__}"
    paths = list(settings.MIDDLEWARE)
    behind = paths[paths.index(ours) + 1 :] if ours in paths else []
    return [path for path in behind if hasattr(import_string(path), "process_view")]


def _checked(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    """Log an error if a protected view, or what is around it, has responded without a claim.

    The page of an error that the view raised says that the request has failed.
    """
    view = getattr(request, "_idempotency_view", None)
    if view is not None and not hasattr(request, "idempotency"):  # the protected handler sets it
        log_unclaimed(view, request, response)
    name = conf.status_header
    if name and hasattr(request, PLANNED) and not response.has_header(name):
        mark(response, FAILED)
    return response


async def _achecked(
    request: HttpRequest, response: Awaitable[HttpResponseBase]
) -> HttpResponseBase:
    return _checked(request, await response)
