"""What the project serves, and how it is protected: for checks and reports.

::

    for endpoint in endpoints():
        print(endpoint.method, endpoint.route, endpoint.how or "unprotected", endpoint.problem)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.urls import URLPattern, get_resolver

from ..conf import MIDDLEWARE, WITH_POLICY, conf
from ..http.declared import is_exempt, policy_of, view_class_of
from ..http.dispatching import answers_itself
from ..http.frameworks import framework_of, is_exempt_by_module
from ..http.inspection import closure_of, held_as
from ..http.opening import POLICIES, POLICY, PROTECTED, opened, protected_part
from ..http.routes import readable
from ..http.wrapping import protect
from ..policy import UNSET, Policy
from ..policy.validators import UNSAFE_METHODS

How = Literal["mixin", "decorator", "middleware", "exempt", ""]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One unsafe method of one route.

    Attributes:
        route: the route in readable form, such as ``/api/charges/{id}/``.
        method: the method; ``"*"`` if the view does not declare its methods.
        view: what the route leads to.
        policy: the policy as it was declared; ``None``: the endpoint has none.
        how: what protects it; ``"exempt"``: it was left out on purpose; ``""``: nothing protects
            it.
        problem: why it cannot be protected, and what to do; empty if there is no problem.
        framework: the name of the view's framework, if there is no adapter for it; else ``None``.
    """

    route: str
    method: str
    view: Any
    policy: Policy | None
    how: How
    problem: str = ""
    framework: str | None = None


def endpoints() -> Iterator[Endpoint]:
    """Every unsafe method of every route of the project's ``ROOT_URLCONF``, in order."""
    for route, view in _routes(get_resolver().url_patterns, ""):
        for method, handler in _handlers(view):
            yield _endpoint(readable(route), method, view, handler)


def _routes(patterns: Iterable[Any], before: str) -> Iterator[tuple[str, Any]]:
    for pattern in patterns:
        route = f"{before}{pattern.pattern}"
        if isinstance(pattern, URLPattern):
            yield route, pattern.callback
        else:
            yield from _routes(pattern.url_patterns, route)


def _handlers(view: Any) -> Iterator[tuple[str, Any]]:
    """The unsafe methods of a view, each with the name of its handler if the view is a class."""
    view_class = view_class_of(view)
    if view_class is None or answers_itself(view_class):
        yield "*", None
        return
    actions = getattr(view, "actions", None)
    for method in sorted(UNSAFE_METHODS):
        name = method.lower() if actions is None else actions.get(method.lower())
        if name is not None and hasattr(view_class, name):
            yield method, name


def _endpoint(route: str, method: str, view: Any, name: str | None) -> Endpoint:
    handler = getattr(view_class_of(view), name, None) if name else None
    try:
        policy, how = _policy_and_how(view, method, name, handler)
    except ImproperlyConfigured as error:  # what it declares is no policy
        return Endpoint(route, method, view, None, "middleware", str(error))
    problem = _problem(view, handler) if how in ("mixin", "decorator", "middleware") else ""
    framework = framework_of(view) if problem else None
    return Endpoint(route, method, view, policy, how, problem, framework)


def _policy_and_how(
    view: Any, method: str, name: str | None, handler: Any
) -> tuple[Policy | None, How]:
    part = protected_part(handler)
    if part is not None:
        return getattr(part, POLICY, None), "decorator"
    marked = getattr(view_class_of(view), PROTECTED, None) or getattr(view, PROTECTED, None)
    if marked:
        policy = getattr(view_class_of(view), POLICY, None) or getattr(view, POLICY, None)
        policies = getattr(view_class_of(view), POLICIES, None)
        if isinstance(policies, dict) and name in policies:
            policy = policies[name]
        return policy, marked if policy else ""
    if is_exempt(view) or is_exempt_by_module(view):
        return None, "exempt"
    if MIDDLEWARE not in settings.MIDDLEWARE:
        return None, ""
    declared = policy_of(view, method)
    if declared is None or (declared is UNSET and conf.middleware_protects == WITH_POLICY):
        return None, ""
    return (Policy() if declared is UNSET else declared), "middleware"


def _problem(view: Any, handler: Any) -> str:
    try:
        protect(view, Policy())
        if handler is not None:
            _open(handler)
    except ImproperlyConfigured as error:
        return str(error)
    return ""


def _open(handler: Any) -> None:
    """Open a handler, also below ``method_decorator``, which decorates it at each call."""
    name = held_as(handler)
    if name is not None and hasattr(handler, PROTECTED):
        _open(closure_of(handler)[name])
    else:
        opened(handler, lambda function: function)
