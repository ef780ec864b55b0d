"""The inventory of a project's endpoints and their protection, for checks and reports.

::

    for endpoint in endpoints():
        print(endpoint.method, endpoint.route, endpoint.how or "unprotected", endpoint.problem)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any, Final, Literal, NamedTuple

from django.conf import settings
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
    dotted_name,
    handlers_of,
    has_own_dispatch,
    initkwargs_of,
    innermost,
    is_exempt,
    module_of,
    modules_of,
    operations_of,
    part_for,
    policy_of,
    variables_of,
    view_class_of,
)
from ..http.routes import is_covered
from ..http.rule import problem_of_view, protected_part
from ..policy import UNSAFE_METHODS, UNSET, Policy
from .routes import literal_of, readable_route

How = Literal["mixin", "decorator", "middleware", "inbox", "exempt", ""]

NOT_ENFORCED: Final = ("", "inbox", "exempt")
"""How endpoints are served that no policy of theirs protects."""

_FORMAT_SUFFIX: Final = re.compile(r"(?:\.|(?<=[^/.]))\{format\}/?$")
"""What ``format_suffix_patterns()`` of REST framework adds to a route."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One unsafe method of one route.

    Attributes:
        route: the route in readable form, such as ``/api/charges/{id}/``.
        method: the method; ``"*"`` if the view does not declare its methods.
        view: what the route leads to, or the function of an operation of django-ninja.
        policy: the policy as it was declared; ``None``: the endpoint has none.
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
    def view_name(self) -> str:
        """The dotted name of the view."""
        view = innermost(view_class_of(self.view) or self.view)
        return dotted_name(view if hasattr(view, "__qualname__") else type(view))

    @property
    def module(self) -> str:
        """The module of the view."""
        return str(innermost(view_class_of(self.view) or self.view).__module__)

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


def endpoints(urlconf: str | None = None) -> Iterator[Endpoint]:
    """Every unsafe method of every route, in order.

    A route with a format suffix is left out where it is another name of a route before it, with the
    same protection.

    Args:
        urlconf: the dotted name of a URLconf; ``None``: the project's ``ROOT_URLCONF``.
    """
    known: set[tuple[str, str]] = set()
    told: set[Endpoint] = set()
    for route in routes(urlconf):
        path = route.readable
        name = _FORMAT_SUFFIX.sub("", path).rstrip("/")
        is_alias = _FORMAT_SUFFIX.search(path) is not None
        for method, handler in _handlers(route.view):
            if operations_of(route.view):  # each has all operations of its path
                if (route.path, method) in known:
                    continue
                known.add((route.path, method))
            endpoint = _endpoint(path, method, handler, route)
            view = id(view_class_of(route.view) or innermost(route.view))
            known_as = replace(endpoint, route=name, view=view)
            if is_alias and known_as in told:
                continue
            told.add(known_as)
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
    known = [each for each in routes() if each.view is view]
    most_alike = max(
        known,
        key=lambda each: SequenceMatcher(None, each.readable, route).ratio(),
        default=Route(route, "", view, 0, frozenset()),
    )
    return _endpoint(route, method, name, most_alike)


class Route(NamedTuple):
    """A route of the project.

    Attributes:
        path: as Django writes it.
        literal: what every path of it begins with.
        view: what it leads to.
        args: how many positional arguments the view gets from it.
        names: the names of the keyword arguments.
        namespaces: the URL namespaces that it is in, the outermost first.
    """

    path: str
    literal: str
    view: Any
    args: int
    names: frozenset[str]
    namespaces: tuple[str, ...] = ()

    @property
    def readable(self) -> str:
        """The path as ``/api/charges/{id}/``."""
        return readable_route(self.path)

    @property
    def is_covered(self) -> bool:
        """Whether ``MIDDLEWARE_PROTECTS`` names all its paths."""
        return is_covered(f"/{self.literal}", self.namespaces)


def routes(urlconf: str | None = None) -> Iterator[Route]:
    """Every route of a URLconf, or of the project's ``ROOT_URLCONF``, in order.

    None without this setting.
    """
    if urlconf is not None or getattr(settings, "ROOT_URLCONF", None):
        yield from _routes(
            get_resolver(urlconf), Route("", "", None, 0, frozenset()), is_whole=True
        )


def _routes(resolver: Any, above: Route, *, is_whole: bool) -> Iterator[Route]:
    """The routes below a prefix, which may be all literal text, with all their arguments."""
    for each in resolver.url_patterns:
        path, regex = str(each.pattern), each.pattern.regex
        text, is_literal = literal_of(path, is_regex=isinstance(each.pattern, RegexPattern))
        names = above.names | frozenset(regex.groupindex)
        route = above._replace(
            path=above.path + path,
            literal=above.literal + text if is_whole else above.literal,
            args=above.args + regex.groups - len(regex.groupindex),
            names=names,
        )
        if isinstance(each, URLPattern):  # names replace positions, as for Django's resolver
            yield route._replace(view=each.callback, args=0 if names else route.args)
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
    elif is_from(view, ("ninja.openapi",)):
        return  # django-ninja's pages about an API
    elif view_class is None:
        for method in sorted(UNSAFE_METHODS & methods) if (methods := _admitted(view)) else ["*"]:
            yield method, ""
    elif handlers := handlers_of(view):
        yield from handlers.items()
    elif has_own_dispatch(view_class) and not _passes_on(view_class.dispatch):
        yield "*", ""


def is_from(view: Any, modules: Collection[str]) -> bool:
    """Whether the view, or a base of its class, is from one of the modules or one below it."""
    return any(
        module == prefix or module.startswith(f"{prefix}.")
        for module in modules_of(view)
        for prefix in modules
    )


def _passes_on(dispatch: Any) -> bool:
    """Whether a ``dispatch()`` checks something and calls that of a base, which ends in a 405."""
    return "dispatch" in getattr(innermost(dispatch), "__code__", dispatch).co_names


def _admitted(view: Any) -> frozenset[str]:
    """The methods that ``require_http_methods()`` and its like admit; empty: any method."""
    found: list[frozenset[str]] = []
    while view is not None:
        if module_of(view) == "django.views.decorators.http":
            lists = [variables_of(view).get("request_method_list")]
            found += map(frozenset, filter(None, lists))
        view = getattr(view, "__wrapped__", None)
    return frozenset.intersection(*found) if found else frozenset()


def _endpoint(path: str, method: str, name: str, route: Route) -> Endpoint:
    """The endpoint of a route and a method, and what protects it.

    Args:
        path: of the endpoint.
        method: likewise.
        name: of the view's handler of the method.
        route: where the project's URLs have the view.
    """
    view = part_for(route.view, method)
    part = protected_part(route.view, method)
    try:
        policy, how = _policy_and_how(view, method, name, part, route)
    except ImproperlyConfigured as error:  # its declaration is not a policy
        return Endpoint(path, method, view, None, "middleware", str(error))
    problem = problem_of_view(route.view, method) if how == "middleware" else ""
    return Endpoint(path, method, view, policy, how, problem, _varies(view, how))


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
    if is_exempt(view):
        return None, "exempt"
    if declared is None:
        return None, _without(getattr(view_class_of(view), POLICIES, None), name)
    if MIDDLEWARE not in settings.MIDDLEWARE:
        return None, ""
    if declared is UNSET and not route.is_covered:
        return None, ""
    return (Policy() if declared is UNSET else declared), "middleware"


def _without(policies: Any, name: str) -> How:
    """Whether a view without a policy was left out: where the policies of others are listed, only
    by name. A new action may have been forgotten.
    """
    are_listed = isinstance(policies, Mapping) and policies
    return "" if are_listed and name not in policies else "exempt"
