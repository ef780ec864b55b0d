"""The API's idempotency specification: which endpoints take a key, for programs and for people.

A client needs it before its first request, because a lost response loses its headers, too::

    path(".well-known/idempotency", discovery)

The answer comes from the inventory, so it says what is enforced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

from django.conf import settings
from django.http import HttpRequest
from django.http.response import HttpResponse, HttpResponseBase
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.urls import Resolver404, get_resolver, get_script_prefix
from django.utils.cache import get_conditional_response, patch_cache_control, patch_vary_headers
from django.utils.translation import override
from django.views.decorators.http import require_safe

from .checks.inventory import Endpoint, endpoints
from .conf import conf, until_settings_change
from .errors import IdempotencyError
from .http.described import problems_of
from .http.messages import replayed_header, status_of
from .http.unwrapping import part_for
from .policy import Policy, dialect_of, keys, project_dialect
from .policy.dialects import Dialect
from .policy.identity import header_of

_JSON: Final = "application/json"
_HTML: Final = "text/html"
_TEMPLATE: Final = "idempotency_django/specification.html"
_MAX_AGE: Final = timedelta(minutes=5)
_SHORTEST: Final = timedelta(seconds=1)
"""The shortest lifetime that can be published; a client could not use a shorter one."""
_UNITS: Final = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))


@require_safe
def discovery(request: HttpRequest, routes: str | Iterable[str] = "/") -> HttpResponseBase:
    """The API's idempotency specification, as JSON, and as a page for browsers.

    ::

        path(".well-known/idempotency", discovery, {"routes": ["/api/", "/hooks/"]})

    It lists protected endpoints only. The views of Django, REST framework and this package, the
    admin's, and mutations of GraphQL are left out. Everybody can read it, unless you put a
    decorator such as ``login_required`` around it.

    Args:
        request: a GET or HEAD request.
        routes: the beginning of the routes to list, or several.
    """
    chosen = (routes,) if isinstance(routes, str) else tuple(routes)
    media_type = request.get_preferred_type([_JSON, _HTML]) or _JSON
    known = (settings.ROOT_URLCONF, chosen, get_script_prefix())
    with override(settings.LANGUAGE_CODE):  # i18n_patterns() has other routes in each language
        try:
            body = _body(media_type, *known)
        except TemplateDoesNotExist:  # the project renders no pages with Django's templates
            media_type = _JSON
            body = _body(media_type, *known)
    response = HttpResponse(body, content_type=media_type)
    response["ETag"] = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    patch_cache_control(response, max_age=int(_MAX_AGE.total_seconds()))
    patch_vary_headers(response, ["Accept"])
    conditional: HttpResponseBase | None
    conditional = get_conditional_response(request, etag=response["ETag"], response=response)
    return conditional or response


def _listed(routes: tuple[str, ...]) -> list[tuple[Endpoint, Policy]]:
    """The endpoints to publish, each with the policy that it enforces."""
    known: set[tuple[str, str]] = set()
    listed = []
    for each in endpoints():
        is_first = known.isdisjoint({(each.route, each.method), (each.route, "*")})
        known.add((each.route, each.method))
        policy = each.enforced
        if (
            policy is not None
            and (policy.ttl is None or policy.ttl >= _SHORTEST)
            and not (each.in_admin or each.is_built_in)
            and not each.mutation  # by a path and a method, a client cannot tell it from others
            and each.route.startswith(routes)
            and not each.route.rstrip("/").endswith(".{format}")  # another name of the endpoint
            and is_first
            and _is_reached(each)
        ):
            listed.append((each, policy))
    return listed


def _is_reached(endpoint: Endpoint) -> bool:
    """Whether no earlier route takes its requests, as far as that is known without parameters."""
    if "{" in endpoint.route:
        return True
    try:
        found = get_resolver().resolve(endpoint.route)
    except Resolver404:  # a regular expression, which cannot be read back
        return True
    return part_for(found.func, endpoint.method) is endpoint.view


def _document(routes: tuple[str, ...]) -> dict[str, Any]:
    header = header_of(project_dialect())
    return {"header": header, "operations": [_operation(*each) for each in _listed(routes)]}


def _path(endpoint: Endpoint) -> str:
    """The path of an endpoint, as clients see it."""
    return get_script_prefix().removesuffix("/") + endpoint.route


def _operation(endpoint: Endpoint, policy: Policy) -> dict[str, Any]:
    """An entry of the document; one that varies by request promises nothing."""
    shown: dict[str, Any] = {"method": endpoint.method, "path": _path(endpoint)}
    if endpoint.varies:
        return shown  # a promise that does not hold for a request is worse than none
    lifetime = key_lifetime = None
    if policy.ttl is not None:
        lifetime = int(policy.ttl.total_seconds())
        # An old key that carries its time is refused for good.
        is_timed = policy.key_format in keys.TIMED or dialect_of(policy).sent_header
        reserved = int((policy.ttl + policy.reserved).total_seconds())
        key_lifetime = None if is_timed else reserved
    return {
        **shown,
        "required": policy.requires_key(endpoint.method.replace("*", "POST")),
        "key_format": policy.key_format if keys.reads_header(policy.key) else None,
        "lifetime": lifetime,
        "key_lifetime": key_lifetime,
        **_place(dialect_of(policy)),
    }


def _place(dialect: Dialect) -> dict[str, Any]:
    """Where the key of an operation is, if it has not the dialect of the whole API."""
    if dialect == project_dialect() and not dialect.members:
        return {}
    if dialect.members:
        return {"dialect": dialect.name, "header": None, "member": dialect.members[0]}
    return {"dialect": dialect.name, "header": header_of(dialect), "member": None}


@until_settings_change
@lru_cache(maxsize=64)
def _body(media_type: str, _urlconf: str, routes: tuple[str, ...], _script_prefix: str) -> bytes:
    document = _document(routes)
    if media_type == _JSON:
        return json.dumps(document, indent=2).encode()
    return render_to_string(_TEMPLATE, _context(document, _listed(routes))).encode()


def _context(document: dict[str, Any], listed: Iterable[tuple[Endpoint, Policy]]) -> dict[str, Any]:
    """The context of the page's template."""
    return {
        "header": document["header"],
        "replayed_header": replayed_header(project_dialect()),
        "varies": any("required" not in each for each in document["operations"]),
        "elsewhere": any("dialect" in each for each in document["operations"]),
        "operations": [
            {
                "method": "any" if each["method"] == "*" else each["method"],
                "path": each["path"],
                "key": _key(each),
                "format": each.get("key_format"),
                "lifetime": _lifetime(each),
            }
            for each in document["operations"]
        ],
        "refusals": list(_refusals(listed)),
    }


def _refusals(listed: Iterable[tuple[Endpoint, Policy]]) -> Iterator[dict[str, Any]]:
    """The errors of each dialect, and the operations that have them."""
    groups: dict[Dialect, tuple[list[str], set[type[IdempotencyError]]]] = {}
    for each, policy in listed:
        operations, errors = groups.setdefault(dialect_of(policy), ([], set()))
        method = "" if each.method == "*" else f"{each.method} "
        operations.append(f"{method}{_path(each)}")
        errors.update(problems_of(policy, each.method.replace("*", "POST")))
    for dialect, (operations, errors) in groups.items():
        rows = sorted((status_of(error, dialect), error.title, error) for error in errors)
        yield {
            "operations": operations if len(groups) > 1 else None,
            "media_type": dialect.media_type,
            "is_problem": dialect.error_body is None,
            "problems": [
                {
                    "status": status,
                    "url": f"{conf.docs_url}{error.slug}",
                    "title": title,
                    "detail": error.default_detail,
                }
                for status, title, error in rows
            ],
        }


def _key(operation: dict[str, Any]) -> str:
    if "required" not in operation:
        return "depends on the request"
    if operation["key_format"] is None:
        return "from the request itself"
    required = "required" if operation["required"] else "optional"
    if member := operation.get("member"):
        return f"{required}, {member} in the body"
    header = operation.get("header")
    return f"{required}, in {header}" if header else required


def _lifetime(operation: dict[str, Any]) -> str:
    if "lifetime" not in operation:
        return "depends on the request"
    seconds = operation["lifetime"]
    return "without limit" if seconds is None else _duration(seconds)


def _duration(seconds: int) -> str:
    """A number of seconds in the largest unit that needs no fraction."""
    whole = (each for each in _UNITS if seconds % each[1] == 0 and seconds)
    unit, size = next(whole, _UNITS[-1])
    count = seconds // size
    return f"{count} {unit}{'' if count == 1 else 's'}"
