"""Protects a view of any kind: a function, a class-based view, a view of REST framework.

``@idempotent`` and the middleware protect a view in the same way, from the inside: the innermost
function runs once. The decorators around it (``login_required``, a rate limit) run for every
request, before a replay. Of a class-based view that function is the handler: in its place on the
view stands what runs it once, where ``dispatch()`` finds it, after everything that it checks
itself, in mixins and subclasses too.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any, Final

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.core.exceptions import (
    BadRequest,
    ImproperlyConfigured,
    PermissionDenied,
    SuspiciousOperation,
)
from django.core.handlers.exception import response_for_exception
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.views.generic import View

from ..errors import IdempotencyError
from ..logs import escaped
from ..policy import UNSAFE_METHODS, Policy, resolve
from ..stores.records import Record
from .messages import (
    Adapter,
    key_header,
    mark_refusal,
    problem_response,
    render,
    without_own_frames,
)
from .replays import check_object
from .serving import aserve, init_idempotency, serve
from .unwrapping import (
    POLICIES,
    POLICY,
    PROTECTED,
    ViewFunction,
    cached_on,
    closure_of,
    innermost,
    is_async,
    is_made_by_as_view,
    is_marked,
    module_of,
    name_of,
    protect_innermost,
    transactions_around,
    validate_framework,
    vars_of,
    view_class_of,
)

_HTTP_ERRORS: Final = (Http404, PermissionDenied, SuspiciousOperation, BadRequest)


class ViewAdapter(Adapter):
    """One request to a view that returns a response.

    Args:
        request: the request.
        view: runs the view.
        instance: the class-based view whose handler it is, where it is one.
    """

    def __init__(self, request: HttpRequest, view: Callable[[], Any], instance: Any = None) -> None:
        self.http_request = self.request = request
        self.method = request.method or ""
        self._view = view
        self._instance = instance

    def authorize(self, record: Record) -> None:
        super().authorize(record)
        if self._instance is not None:
            check_object(self._instance, record)

    def respond(self) -> HttpResponseBase:
        # A template is rendered here, inside the transaction, because its output is stored.
        return render(self._checked(self._view()))

    async def arespond(self) -> HttpResponseBase:
        response = self._checked(await self._view())
        if not hasattr(response, "render"):
            return response
        return await sync_to_async(render)(response)

    def _checked(self, response: object) -> HttpResponseBase:
        """What the view returned, which must be a response."""
        if isinstance(response, HttpResponseBase):
            return response
        raise TypeError(
            f"The view of {escaped(self.http_request.path)} returned {type(response).__name__}, "
            "not an HttpResponse."
        )

    def recover(self, error: Exception) -> HttpResponseBase:
        if self.policy.should_store and isinstance(error, _HTTP_ERRORS):
            return response_for_exception(self.http_request, error)
        raise error

    def problem(self, error: IdempotencyError) -> HttpResponseBase:
        """The response of a refusal."""
        return problem_response(error)


ADAPTER: Final = "_idempotency_adapter"
"""The attribute of a request with the :class:`ViewAdapter` of a framework of functions."""


def serve_view(
    policy: Policy, instance: Any, request: HttpRequest, run: Callable[[], Any]
) -> HttpResponseBase:
    """Serve the request; a refusal is a problem.

    Args:
        policy: the view's.
        instance: the class-based view whose handler it is; ``None``: it is a function.
        request: the request.
        run: runs the view.
    """
    adapter = getattr(request, ADAPTER, ViewAdapter)(request, run, instance)
    try:
        return serve(adapter, resolve(policy))
    except IdempotencyError as error:
        if error.foreign:
            raise
        return _refusal(adapter, error)
    except Exception as error:  # noqa: BLE001  # the view's own, raised again
        raise without_own_frames(error)  # noqa: B904  # its context is its own


async def aserve_view(
    policy: Policy, instance: Any, request: HttpRequest, run: Callable[[], Any]
) -> HttpResponseBase:
    """:func:`serve_view` for an async view."""
    adapter = getattr(request, ADAPTER, ViewAdapter)(request, run, instance)
    try:
        return await aserve(adapter, resolve(policy))
    except IdempotencyError as error:
        if error.foreign:
            raise
        return _refusal(adapter, error)
    except Exception as error:  # noqa: BLE001  # the view's own, raised again
        raise without_own_frames(error)  # noqa: B904  # its context is its own


def _refusal(adapter: ViewAdapter, error: IdempotencyError) -> HttpResponseBase:
    response = adapter.problem(error)
    mark_refusal(response, adapter.http_request, error)
    return response


BY_DECORATOR: Final = "decorator"

Serve = Callable[[Any, Callable[[], Any]], Any]
ServeWithin = Callable[[Policy, Any, Callable[[], Any]], HttpResponseBase]

logger = logging.getLogger("idempotency_django")

_ONCE: Final = "_idempotency_once"
"""The attribute with the replacement of a handler."""

_frameworks: Final[list[tuple[type, type, type, ServeWithin]]] = []
"""The arguments of each call of :func:`register_framework`."""


def protect(view: Any, policy: Policy | None) -> Any:
    """Protect a view: a function, a class, or what ``as_view()`` made.

    Its innermost function runs once per operation. The decorators around that function run for
    every request, before a replay. What is already protected stays as it is.

    Args:
        view: the view.
        policy: its policy; ``None`` on a DRF view leaves it to ``idempotency_policies``.

    Raises:
        ImproperlyConfigured: it cannot be protected; the error contains the fix.
    """
    validate_framework(view)
    if not inspect.isclass(view):
        return protect_innermost(view, functools.partial(_protected, policy=policy))
    return view if is_marked(view, PROTECTED) else _protected_class(view, policy)


def validate_handler(view_class: Any, name: str) -> None:
    """Raise what :func:`replace_handler` would raise for a request; for the system checks."""
    view = object.__new__(view_class)
    protect_innermost(method_of(view, getattr(view, name)), lambda function: function)


def _protected(function: Any, policy: Policy | None) -> Any:
    """The function that runs an innermost function once; a protected one stays as it is."""
    if is_marked(function, PROTECTED):
        return function
    if is_made_by_as_view(function):
        protected = _protected_as_view(function, policy)
    elif policy is None:
        return function
    elif getattr(function, "__name__", "") == "dispatch":
        protected = _protected_dispatch(function, policy)
    else:
        make = _async if iscoroutinefunction(function) else _sync
        protected = make(function, policy)
    setattr(protected, PROTECTED, BY_DECORATOR)
    setattr(protected, POLICY, policy)
    return protected


def _sync(view: ViewFunction, policy: Policy) -> ViewFunction:
    """A view that runs once."""

    @functools.wraps(view)
    def protected(*args: Any, **kwargs: Any) -> Any:
        request, instance = args[0] if args else None, None
        run = functools.partial(view, *args, **kwargs)
        if not isinstance(request, HttpRequest):
            request, instance = _request_among(args, kwargs), _instance_of(args)
            if not isinstance(request, HttpRequest):
                return _serve_once(policy, None, request, run)
        return serve_view(policy, instance, request, run)

    return protected


def _async(view: ViewFunction, policy: Policy) -> ViewFunction:
    @functools.wraps(view)
    async def protected(*args: Any, **kwargs: Any) -> Any:
        run = functools.partial(view, *args, **kwargs)
        return await aserve_view(policy, _instance_of(args), _request_among(args, kwargs), run)

    return protected


def _request_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The request among a view's arguments, of which the first may be a method's ``self``."""
    for given in (*args[:2], kwargs.get("request")):
        if isinstance(getattr(given, "_request", given), HttpRequest):
            return given
    raise TypeError(
        "A view with @idempotent was called without a request. Pass the request as the first "
        "argument, or as request=."
    )


def _instance_of(args: tuple[Any, ...]) -> View | None:
    """The class-based view whose method is called; ``None``: it is a function."""
    return args[0] if args and isinstance(args[0], View) else None


# Class-based views.


HOOKS: Final = (
    "check_idempotent_replay",
    "get_idempotency_key",
    "get_idempotency_policy",
    "get_idempotency_scope",
    "rebuild_idempotent_response",
)
"""The methods of a mixin that a view may have without it."""


def register_framework(base: type, mixin: type, request: type, serve_within: ServeWithin) -> None:
    """Protect the views of another framework; called by its adapter.

    Args:
        base: the base class of its views.
        mixin: comes before a view class and protects it.
        request: the class of the requests that its handlers get.
        serve_within: serves such a request, whose view already runs: it responds, or
            calls what runs the handler.
    """
    _frameworks.append((base, mixin, request, serve_within))


def misplaced_mixin(view_class: Any) -> str:
    """What is wrong with the place of a framework's mixin in a class; empty: nothing."""
    order = getattr(view_class, "__mro__", ())
    for base, mixin, *_ in _frameworks:
        if mixin in order and base in order and order.index(mixin) > order.index(base):
            return (
                f"{name_of(view_class)} has {mixin.__name__} after {base.__name__} in its bases, "
                "so the view is not protected."
            )
    return ""


def overrides_dispatch(view_class: Any) -> bool:
    """Whether a class does the work of all unsafe methods in a ``dispatch()`` of its own."""
    if any(hasattr(view_class, method.lower()) for method in UNSAFE_METHODS):
        return False
    dispatch = innermost(view_class.dispatch)
    known = module_of(dispatch).startswith(("django.", "rest_framework.", "idempotency_django."))
    # One that checks something and passes on to super().dispatch() ends in a 405.
    return not known and "dispatch" not in getattr(dispatch, "__code__", dispatch).co_names


def _protected_as_view(view: Any, policy: Policy | None) -> Any:
    """The function that ``as_view()`` made, made again of the protected class."""
    protected_class = _protected_class(view_class_of(view), policy)
    # Not by the class's own as_view(): its wrappers are already applied.
    bases = [base for base in protected_class.__mro__ if base.__module__ == module_of(view)]
    as_view = next(vars(base)["as_view"] for base in bases if "as_view" in vars(base))
    held = closure_of(view)
    actions = [held["actions"]] if "actions" in held else []
    again = as_view.__func__(protected_class, *actions, **held["initkwargs"])
    attributes = {**vars_of(view), **vars_of(again)}
    attributes |= dict.fromkeys({"cls", "view_class"} & attributes.keys(), protected_class)
    vars_of(again).update(attributes)
    return again


def _protected_class(view_class: Any, policy: Policy | None) -> Any:
    """A subclass whose handlers run once. ``ImproperlyConfigured``: none would be protected."""
    if not issubclass(view_class, View):
        raise ImproperlyConfigured(
            f"@idempotent is on {name_of(view_class)}, which is not a view. Put it on a function, "
            "or on a class that is a View."
        )
    if overrides_dispatch(view_class):
        raise ImproperlyConfigured(
            f"{name_of(view_class)} overrides dispatch() and has no post(), put(), patch() or "
            "delete() to protect. If dispatch() checks no permissions, put @idempotent on "
            "dispatch(). Otherwise leave the class unprotected with @idempotency_exempt."
        )
    mixins = [mixin for base, mixin, *_ in _frameworks if issubclass(view_class, base)]
    body = {
        "__module__": view_class.__module__,
        "__qualname__": view_class.__qualname__,
        "__doc__": view_class.__doc__,
        PROTECTED: BY_DECORATOR,
        POLICY: policy,
        # Those of the view, which the mixin's own would hide.
        POLICIES: getattr(view_class, POLICIES, {}),
        **{name: getattr(view_class, name) for name in HOOKS if hasattr(view_class, name)},
    }
    if not mixins:
        body["dispatch"] = _protected_dispatch(view_class.dispatch, policy)
    return type(view_class.__name__, (*mixins, view_class), body)


def _protected_dispatch(dispatch: Any, policy: Any) -> Any:
    """A ``dispatch()`` around a handler that runs once; one without handlers runs once itself."""
    whole = _async(dispatch, policy) if iscoroutinefunction(dispatch) else _sync(dispatch, policy)

    @functools.wraps(dispatch)
    def protected(view: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(view, View) or overrides_dispatch(type(view)):
            return whole(view, *args, **kwargs)
        request: HttpRequest = _request_among(args, kwargs)
        init_idempotency(request)
        chosen = getattr(view, POLICIES, {}).get((request.method or "").lower(), policy)
        if chosen is None:
            return dispatch(view, *args, **kwargs)
        if is_async(type(view)):
            if transactions_around(view.dispatch):
                # method_decorator has decorated a stand-in that is not async: Django cannot know.
                raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")
            replace_handler(view, request, functools.partial(aserve_view, chosen, view))
            return _achecked(view, request, dispatch(view, *args, **kwargs))
        replace_handler(view, request, functools.partial(_serve_once, chosen, view))
        response = dispatch(view, *args, **kwargs)
        log_unreached(view, request, response)
        return response

    if iscoroutinefunction(dispatch):
        markcoroutinefunction(protected)
    return protected


async def _achecked(view: Any, request: HttpRequest, response: Any) -> Any:
    if inspect.isawaitable(response):  # a mixin's refusal is not awaitable
        response = await response
    log_unreached(view, request, response)
    return response


def _serve_once(
    policy: Policy, instance: View | None, request: Any, run: Callable[[], Any]
) -> HttpResponseBase:
    for _, _, request_class, serve_within in _frameworks:
        if isinstance(request, request_class):
            return serve_within(policy, request, run)
    return serve_view(policy, instance, request, run)


# The handler of a class-based view.


def replace_handler(view: Any, request: HttpRequest, serve: Serve) -> None:
    """Replace the request's handler with one that lets ``serve`` run it.

    Decorators on the handler run for every request. A handler that is protected already stays.

    Args:
        view: the instance of a class-based view that handles this request.
        request: the request.
        serve: called with the request, as the handler gets it, and what runs the handler.

    Raises:
        ImproperlyConfigured: the handler has a decorator that is not known, or is not a method.
    """
    view._idempotency_serve = serve
    if request.method not in UNSAFE_METHODS:
        return
    name = request.method.lower()
    handler = getattr(view, name, None)
    before = getattr(view, "_idempotency_placed", None)
    if before is not None and handler is before[0]:
        handler = before[1]  # its own again: a loop around dispatch() runs the view again
    if handler is None:
        return
    function = method_of(view, handler)
    once = cached_on(function, _ONCE, functools.partial(protect_innermost, function, _once))
    stand_in = MethodType(once, view)
    setattr(view, name, stand_in)
    view._idempotency_placed = (stand_in, handler)
    view._idempotency_reached = once is function  # then it is protected inside, and claims itself


def method_of(view: Any, handler: Any) -> Any:
    """The function of a handler.

    Raises:
        ImproperlyConfigured: the handler is not a method of the view.
    """
    if getattr(handler, "__self__", None) is view and isinstance(handler, MethodType):
        return handler.__func__
    raise ImproperlyConfigured(
        f"The handler {name_of(handler)} is not a method of {name_of(type(view))}, so it cannot be "
        "protected. Make it a method."
    )


def _once(function: Any) -> Any:
    """Make the function that stands in for a handler's innermost function."""

    @functools.wraps(function)
    def once(*args: Any, **kwargs: Any) -> Any:
        request: Any = _request_among(args, kwargs)
        instance: Any = args[0] if args else None
        if not hasattr(instance, "_idempotency_serve"):  # the function of an @api_view
            instance = request.parser_context["view"]
        instance._idempotency_reached = True
        run = functools.partial(function, *args, **kwargs)
        return instance._idempotency_serve(request, run)

    return markcoroutinefunction(once) if iscoroutinefunction(function) else once


def log_unreached(view: Any, request: HttpRequest, response: HttpResponseBase) -> None:
    """Log an error if a request with a key succeeded and its handler was never called."""
    if not getattr(view, "_idempotency_reached", False):
        log_unclaimed(type(view), request, response)


def log_unclaimed(view: Any, request: HttpRequest, response: HttpResponseBase) -> None:
    """Log an error if a protected view responded without a claim, and successfully."""
    method = request.method
    if method not in UNSAFE_METHODS or not 200 <= response.status_code < 300:
        return
    if key_header(request) is not None:
        logger.error(
            "%s is not protected: it responded to %s %s with %s without calling the protected "
            "handler. Put @idempotent on the function that does the work.",
            name_of(view),
            request.method,
            request.path,
            response.status_code,
        )
