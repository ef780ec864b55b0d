"""The middleware: protects the views of a project without touching them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from asgiref.sync import (
    async_to_sync,
    iscoroutinefunction,
    markcoroutinefunction,
    sync_to_async,
)
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.base import BaseHandler
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.module_loading import import_string

from .conf import conf
from .http.declared import (
    ViewFunction,
    is_exempt,
    is_rest_framework,
    part_for,
    policy_of,
    view_class_of,
)
from .http.marking import FAILED, mark
from .http.messages import PLANNED, key_header
from .http.routes import is_covered
from .http.rule import problem_of_view, protected_part
from .http.serving import init_idempotency, log_unread_field
from .http.wrapping import log_unclaimed, once, refuse_key, replace_handler
from .policy import PROJECT_POLICY, UNSAFE_METHODS, UNSET, Policy, resolve

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
        validate_order(get_response)
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

    def process_view(self, request: HttpRequest, view: ViewFunction, args: Any, kwargs: Any) -> Any:
        """Mark a request for the class of its view, which Django calls as usual.

        A plain function is run here, as Django would run it.
        """
        run = _to_run(request, view)
        if run is None:
            return None
        try:
            run = BaseHandler().make_view_atomic(run)
            if iscoroutinefunction(run):
                run = async_to_sync(run)
            return run(request, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # raised again where Django expects it
            return _Raised(error, request)

    async def _aprocess_view(
        self, request: HttpRequest, view: ViewFunction, args: Any, kwargs: Any
    ) -> Any:
        run = _to_run(request, view)
        if run is None:
            return None
        try:
            run = BaseHandler().make_view_atomic(run)
            if not iscoroutinefunction(run):
                run = sync_to_async(run)
            return await run(request, *args, **kwargs)
        except Exception as error:  # noqa: BLE001
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

_marking: Final[WeakSet[type]] = WeakSet()
"""The classes that look for a mark."""


def _to_run(request: HttpRequest, view: ViewFunction) -> ViewFunction | None:
    """What the middleware has to run in the place of the view; ``None``: Django runs the view."""
    method = request.method or ""
    part = part_for(view, method)
    if method not in UNSAFE_METHODS or is_exempt(view) or is_exempt(part):
        return None
    if protected_part(view, method) is not None:
        request._idempotency_view = view  # type: ignore[attr-defined]
        return None
    policy = _policy_for(request, part, method)
    if policy is None:
        return None
    view_class = view_class_of(view)
    finds_key = bool(policy.key) or hasattr(view_class, "get_idempotency_key")
    takes_part = key_header(request) is not None or finds_key or policy.requires_key(method)
    problem = problem_of_view(view, method)
    if not takes_part:
        if not problem:
            init_idempotency(request)
            log_unread_field(request)
        return None
    if problem:
        return partial(refuse_key, view, problem)
    if view_class is None:
        return once(view, policy)
    request._idempotency_view = view  # type: ignore[attr-defined]
    setattr(request, _MARK, _Mark(view_class, policy))
    _look_for_marks(view_class)
    return None


def _policy_for(request: HttpRequest, view: ViewFunction, method: str) -> Policy | None:
    """The policy of a view, or the project's, if the middleware protects the view."""
    declared = policy_of(view, method)
    if declared is not UNSET:
        return declared and resolve(declared)
    match = request.resolver_match
    is_chosen = is_covered(request.path_info, match.namespaces if match else [])
    return resolve(PROJECT_POLICY) if is_chosen else None


def _look_for_marks(view_class: Any) -> None:
    """Let a class replace the handler of a marked request, after all that its ``setup()`` or
    ``initial()`` does.

    Django calls the view, with its decorators. So their checks, and those of ``dispatch()``, come
    before the handler.
    """
    if view_class in _marking:
        return
    name = "initial" if is_rest_framework(view_class) else "setup"
    own = vars(view_class).get(name)

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

    setattr(view_class, name, prepared)
    _marking.add(view_class)


def validate_order(get_response: Any) -> None:
    """Refuse a position before a middleware whose ``process_view`` would be skipped.

    Args:
        get_response: the middleware after this one, as Django has built them.

    Raises:
        ImproperlyConfigured: there are such middleware; the error names them.
    """
    skipped = skipped_middleware()
    following = get_response
    while following is not None:  # one may have got its process_view when it was built
        following = getattr(following, "__wrapped__", None) or getattr(
            following, "get_response", None
        )
        if hasattr(following, "process_view") and not _is_ours(type(following)):
            name = f"{type(following).__module__}.{type(following).__qualname__}"
            skipped = [*skipped, name] if name not in skipped else skipped
    if skipped:
        raise ImproperlyConfigured(
            "IdempotencyMiddleware runs views itself and would skip the process_view of the "
            f"middleware after it: {', '.join(skipped)}. Move IdempotencyMiddleware after it in "
            "MIDDLEWARE."
        )


def skipped_middleware() -> list[str]:
    """The middleware after this one in ``MIDDLEWARE`` that have a ``process_view``, or may.

    A function may give one to what it returns.
    """
    paths = list(settings.MIDDLEWARE)
    found = [import_string(path) for path in paths]
    ours = [place for place, each in enumerate(found) if _is_ours(each)]
    behind = zip(paths[ours[0] + 1 :], found[ours[0] + 1 :], strict=True) if ours else ()
    return [path for path, each in behind if not _is_ours(each) and _may_look_at_views(each)]


def _is_ours(middleware: Any) -> bool:
    return inspect.isclass(middleware) and issubclass(middleware, IdempotencyMiddleware)


def _may_look_at_views(middleware: Any) -> bool:
    return (
        not inspect.isclass(middleware)
        or hasattr(middleware, "process_view")
        or hasattr(middleware, "__getattr__")
    )


def _checked(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    """Log an error if a protected view, or what is around it, has responded without a claim.

    The page of an error that the view raised says that the request has failed.
    """
    error = getattr(request, "_idempotency_raised", None)
    if error is not None:  # a process_template_response has replaced it
        raise error
    view = getattr(request, "_idempotency_view", None)
    if view is not None:
        log_unclaimed(view, request, response)
    name = conf.status_header
    if name and hasattr(request, PLANNED) and not response.has_header(name):
        mark(response, FAILED)
    return response


async def _achecked(
    request: HttpRequest, response: Awaitable[HttpResponseBase]
) -> HttpResponseBase:
    return _checked(request, await response)
