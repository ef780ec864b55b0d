"""The inventory of a project's endpoints and their protection, for checks and reports.

::

    for endpoint in endpoints():
        print(endpoint.method, endpoint.route, endpoint.how or "unprotected", endpoint.problem)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any, Final, Literal, NamedTuple

from django.conf import settings
from django.contrib.admindocs.views import simplify_regex
from django.core.exceptions import ImproperlyConfigured
from django.urls import URLPattern, get_resolver
from django.urls.resolvers import RegexPattern

from ..conf import MIDDLEWARE
from ..http.declared import (
    BUILT_IN,
    INBOX,
    POLICIES,
    POLICY,
    PROTECTED,
    checked,
    handlers_of,
    has_own_dispatch,
    initkwargs_of,
    innermost,
    is_covered,
    module_of,
    name_of,
    operations_of,
    part_for,
    policy_of,
    variables_of,
    view_class_of,
)
from ..http.rule import objection_to_view, protected_part
from ..policy import INHERITED, UNSAFE_METHODS, UNSET, Policy

How = Literal["mixin", "decorator", "middleware", "inbox", "exempt", ""]

_FORMAT_SUFFIX: Final = re.compile(r"(?:\.|(?<=[^/.]))\{format\}/?$")
"""What ``format_suffix_patterns()`` of REST framework adds to a route."""

_LITERAL: Final = re.compile(r"\^([\w/-]*)(?![?*+{])")
_PARAMETER: Final = re.compile(r"<(?:[^<>:]+:)?(\w+)>")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One unsafe method of one route.

    Attributes:
        route: the route in readable form, such as ``/api/charges/{id}/``.
        method: the method; ``"*"`` if the view does not declare its methods.
        view: what the route leads to, or the function of an operation of django-ninja.
        policy: the policy as it was declared; ``None``: the endpoint has none. It is ``INHERITED``
            itself where the middleware protects a view that declares none.
        how: what protects it; ``"inbox"``: it receives webhooks, each of which is handled once;
            ``"exempt"``: it was left out on purpose; ``""``: nothing protects it.
        problem: why it cannot be protected, and what to do; empty if there is no problem.
        varies: whether the view has a ``get_idempotency_policy()`` of its own, which may return
            another policy for each request.
    """

    route: str
    method: str
    view: Any
    policy: Policy | None
    how: How
    problem: str = ""
    varies: bool = False

    @property
    def source(self) -> Any:
        """The class or the function that the view was made of."""
        return innermost(view_class_of(self.view) or self.view)

    @property
    def view_name(self) -> str:
        """The dotted name of the view."""
        return name_of(self.source)

    @property
    def enforced(self) -> Policy | None:
        """The policy that every request with a key is held to, resolved; ``None``: there is none,
        or the endpoint cannot be protected.
        """
        if self.policy is None or self.problem:
            return None
        return self.policy.resolved()

    @property
    def is_built_in(self) -> bool:
        """Whether the view is one of Django, REST framework or this package."""
        return self.view_name.startswith(BUILT_IN)


def endpoints() -> Iterator[Endpoint]:
    """Every unsafe method of every route of ``ROOT_URLCONF``, in order.

    One that differs from another only by the format at its end is left out.
    """
    known: set[Endpoint] = set()
    for route in routes():
        for method, handler in _handlers(route.view):
            endpoint = _endpoint(route, method, handler)
            path = _FORMAT_SUFFIX.sub("", endpoint.route).rstrip("/")
            alike = replace(endpoint, route=path, view=id(endpoint.source))  # it may have no hash
            if alike not in known:
                known.add(alike)
                yield endpoint


def endpoint_of(view: Any, method: str, route: str) -> Endpoint | None:
    """The endpoint of one method of a view; ``None``: the view does not change anything by it.

    Args:
        view: what a URL leads to.
        method: of the request.
        route: in readable form. The one in the project's URLconf may be longer, as in the schema of
            a part of the URLs.
    """
    handlers = dict(_handlers(view))
    name = handlers.get(method, handlers.get("*"))
    if name is None:
        return None
    known = [each for each in routes() if each.view is view] or [Route(route, "", view)]
    alike = max(known, key=lambda each: SequenceMatcher(None, each.readable, route).ratio())
    return replace(_endpoint(alike, method, name), route=route)


def readable_route(route: str) -> str:
    """The route as ``/api/charges/{id}/``, also if it was written as a regular expression."""
    simple: str = simplify_regex(route)
    return _PARAMETER.sub(r"{\1}", simple.replace("\\", ""))


def literal_of(route: str, *, is_regex: bool) -> tuple[str, bool]:
    """The text that every path of a route begins with, and whether that is all of the route."""
    if not is_regex:
        text = route.partition("<")[0]
        return text, text == route
    found = None if "|" in route else _LITERAL.match(route)
    return (found[1], f"^{found[1]}" == route.rstrip("$")) if found else ("", False)


class Route(NamedTuple):
    """A route of the project.

    Attributes:
        path: as Django writes it.
        literal: what every path of it begins with.
        view: what it leads to.
        namespaces: the URL namespaces that it is in, the outermost first.
    """

    path: str
    literal: str
    view: Any
    namespaces: tuple[str, ...] = ()

    @property
    def readable(self) -> str:
        """The path as ``/api/charges/{id}/``."""
        return readable_route(self.path)

    @property
    def is_covered(self) -> bool:
        """Whether ``MIDDLEWARE_PROTECTS`` names all its paths."""
        return is_covered(f"/{self.literal}", self.namespaces)


def routes() -> Iterator[Route]:
    """Every route of the project's ``ROOT_URLCONF``, in order; none without this setting."""
    if getattr(settings, "ROOT_URLCONF", None):
        yield from _routes(get_resolver(), Route("", "", None), is_whole=True)


def _routes(resolver: Any, above: Route, *, is_whole: bool) -> Iterator[Route]:
    """The routes below a prefix, which may be all literal text."""
    for each in resolver.url_patterns:
        path = str(each.pattern)
        text, is_literal = literal_of(path, is_regex=isinstance(each.pattern, RegexPattern))
        literal = above.literal + text if is_whole else above.literal
        route = above._replace(path=above.path + path, literal=literal)
        if isinstance(each, URLPattern):
            yield route._replace(view=each.callback)
        else:
            within = (*above.namespaces, each.namespace) if each.namespace else above.namespaces
            inner = route._replace(namespaces=within)
            yield from _routes(each, inner, is_whole=is_whole and is_literal)


def _handlers(view: Any) -> Iterator[tuple[str, str]]:
    """The unsafe methods of a view, each with the name of its handler if the view is a class."""
    view_class: Any = view_class_of(view)
    if operations := operations_of(view):
        for method in sorted(UNSAFE_METHODS & {m for each in operations for m in each.methods}):
            yield method, ""
    elif view_class is not None and (handlers := handlers_of(view)):
        yield from handlers.items()
    elif view_class is not None:
        if has_own_dispatch(view_class) and not _passes_on(view_class.dispatch):
            yield "*", ""
    elif not module_of(innermost(view)).startswith("ninja.openapi"):  # its pages about an API
        methods = _admitted(view)
        for method in ["*"] if methods == UNSAFE_METHODS else sorted(methods):
            yield method, ""


def _passes_on(dispatch: Any) -> bool:
    """Whether a ``dispatch()`` checks something and calls that of a base, which ends in a 405."""
    return "dispatch" in getattr(innermost(dispatch), "__code__", dispatch).co_names


def _admitted(view: Any) -> frozenset[str]:
    """The unsafe methods that ``require_http_methods()`` and its like admit; else all of them."""
    admitted = frozenset(UNSAFE_METHODS)
    while view is not None:
        if module_of(view) == "django.views.decorators.http":
            admitted &= {*variables_of(view).get("request_method_list", admitted)}
        view = getattr(view, "__wrapped__", None)
    return admitted


def _endpoint(route: Route, method: str, name: str) -> Endpoint:
    """The endpoint of a method of a route, and what protects it.

    Args:
        route: where the project's URLs have the view.
        method: of the endpoint.
        name: of the view's handler of the method.
    """
    view = part_for(route.view, method)
    part = protected_part(route.view, method)
    try:
        policy, how = _policy_and_how(view, method, name, part, route)
    except ImproperlyConfigured as error:  # its declaration is not a policy
        return Endpoint(route.readable, method, view, None, "middleware", str(error))
    problem = objection_to_view(route.view, method) if how == "middleware" else ""
    return Endpoint(route.readable, method, view, policy, how, problem, _varies(view, how))


def _varies(view: Any, how: How) -> bool:
    """Whether a view has a method of its own for the policy of a request."""
    method = getattr(view_class_of(view), "get_idempotency_policy", None)
    return how == "mixin" and not getattr(method, "__module__", "").startswith(BUILT_IN)


def _policy_and_how(
    view: Any, method: str, name: str, part: Any, route: Route
) -> tuple[Policy | None, How]:
    """The policy that is enforced, and by what; ``None``: none is, on purpose unless the text is
    empty.
    """
    if part is not None:
        given = initkwargs_of(view)
        policies = given.get(POLICIES, getattr(part, POLICIES, None))
        policy = given.get(POLICY, getattr(part, POLICY, None))
        if isinstance(policies, dict) and name in policies:
            policy = policies[name]
        if policy is None:
            return None, _without(policies, name)
        return checked(policy, view), getattr(part, PROTECTED)
    if getattr(view, INBOX, False):
        return None, "inbox"
    declared = policy_of(view, method)
    if declared is None:
        return None, _without(getattr(view_class_of(view), POLICIES, None), name)
    if MIDDLEWARE not in settings.MIDDLEWARE:
        return None, ""
    if declared is UNSET and not route.is_covered:
        return None, ""
    return (INHERITED if declared is UNSET else declared), "middleware"


def _without(policies: Any, name: str) -> How:
    """Whether a view without a policy was left out: where the policies of others are listed, only
    by name. A new action may have been forgotten.
    """
    are_listed = isinstance(policies, Mapping) and policies
    return "" if are_listed and name not in policies else "exempt"
