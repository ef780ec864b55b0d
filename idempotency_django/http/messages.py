"""Between HTTP and plain values: requests to calls, answers to payloads and back, problems."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC
from functools import lru_cache, partial
from typing import Any

from django.conf import settings
from django.core.exceptions import DisallowedHost, ImproperlyConfigured
from django.db import models
from django.http import HttpRequest, HttpResponse
from django.http.request import HttpHeaders, split_domain_port
from django.http.response import HttpResponseBase
from django.utils import timezone

from ..conf import conf
from ..errors import IdempotencyError
from ..policy import Policy
from ..policy.canonical import digest
from ..policy.invocation import Body, Invocation, LazyInvocation
from ..records import REASON, Payload
from .bodies import body_of
from .routes import name_of_route

# From a request to a call.


def invocation_of(
    request: HttpRequest,
    policy: Policy | None = None,
    *,
    own: Any = None,
    auth: Any = None,
    body: Callable[[], Body] | None = None,
) -> Invocation:
    """What the policy needs to know of a request.

    Args:
        request: Django's request.
        policy: the policy, which may know who is calling.
        own: the request as the framework's own views know it, if that is another one.
        auth: what authenticated the request, if the framework says so.
        body: reads the body when it is asked for, if the framework does so in its own way.
    """
    own = request if own is None else own
    try:
        principal = principal_of(getattr(own, "user", None), auth)
    except ImproperlyConfigured:
        if policy is None or policy.principal is None:
            raise
        principal = ""  # the policy knows better
    return LazyInvocation(
        name=operation_name(request),
        principal=principal,
        since=since_of(getattr(own, "user", None)) if principal else "",
        credentials="" if principal else credentials_of(request),
        host=host_of(request),
        method=request.method or "",
        path=request.path,
        query=request.META.get("QUERY_STRING", ""),
        media_type=(request.content_type or "").lower(),
        read=body or partial(body_of, request),
        request=own,
    )


def credentials_of(request: HttpRequest) -> str:
    """A digest of the credentials of a request; empty if it has none.

    Nobody has checked them: the view may refuse them, or may ignore them.
    """
    headers = [request.META.get(meta_name(name), "") for name in conf.credential_headers]
    cookies = [request.COOKIES.get(name, "") for name in conf.credential_cookies]
    if not (any(headers) or any(cookies)):
        return ""
    return f"credentials:{digest(*headers, *cookies)}"


def host_of(request: HttpRequest) -> str:
    """The name of the request's host, in lower case and without a port.

    It is not checked against ``ALLOWED_HOSTS``: the view may not check it either.
    """
    try:
        host = request.get_host()
    except DisallowedHost:
        host = request.META.get("HTTP_HOST", "")
    return _without_port(host)


@lru_cache(maxsize=256)
def _without_port(host: str) -> str:
    return split_domain_port(host)[0] or host.lower()


def key_header(request: HttpRequest) -> str | None:
    """The value of the key header, as it was sent."""
    value: str | None = request.META.get(meta_name(conf.header))
    return value


meta_name = lru_cache(HttpHeaders.to_wsgi_name)


def operation_name(request: HttpRequest) -> str:
    """The method and the route, ``"POST /orders/<int:pk>/pay/"``: stable when code moves."""
    match = request.resolver_match
    route = name_of_route(match.route) if match and match.route is not None else request.path
    return f"{request.method} {route}"


def principal_of(user: Any, auth: Any = None) -> str:
    """Who is calling: ``"user:42"``; empty for callers who are not told apart.

    Args:
        user: the request's user.
        auth: what authenticated the request where there is no user, for example an API key. Only a
            digest of it is used, because it may be a secret. What has no primary key, the claims
            of a token for example, names nobody.

    Raises:
        ImproperlyConfigured: the user has no primary key.
    """
    if user is not None and getattr(user, "is_authenticated", False):
        pk = getattr(user, "pk", None)
        if pk is None:
            raise _no_primary_key(user)
        # Of its class: a lazy user passes for one, but is none.
        return f"{_kind(user.__class__, settings.AUTH_USER_MODEL)}:{pk}"
    if isinstance(auth, str | bytes):
        return f"auth:{digest(auth)}"
    key = getattr(auth, "pk", None)
    if key is None:
        return ""
    return f"auth:{_kind(auth.__class__, settings.AUTH_USER_MODEL)}:{digest(str(key))}"


def caller_of(user: Any, auth: Any = None) -> str:
    """Who is calling, told from those who had the same name before."""
    return principal_of(user, auth) + since_of(user)


def since_of(user: Any) -> str:
    """When the user's account began; empty if its primary key is no other's at any time.

    A user name that is a primary key may be given to a second person after the first one is
    deleted.
    """
    model = getattr(user.__class__, "_meta", None)
    name = known_since(model.concrete_model) if model is not None else None
    began = getattr(user, name) if name else None
    if began is None:
        return ""
    return f" since {(began if timezone.is_naive(began) else began.astimezone(UTC)).isoformat()}"


@lru_cache(maxsize=64)
def known_since(model: Any) -> str | None:
    """The field that tells two users who had one primary key apart; ``None``: there is none.

    It is empty where primary keys are not given again: the database or a UUID makes them.
    """
    key = model._meta.pk
    while key.is_relation:
        key = key.target_field
    if isinstance(key, models.AutoField | models.UUIDField):
        return ""
    times = [
        field for field in model._meta.concrete_fields if isinstance(field, models.DateTimeField)
    ]
    named = (f.attname for f in times if f.auto_now_add or f.attname == "date_joined")
    return next(named, None)


@lru_cache(maxsize=64)
def _kind(caller: type, user_model: str) -> str:
    """The kind of a caller, because kinds may share primary keys: ``"user"`` is the user model."""
    model = getattr(getattr(caller, "_meta", None), "concrete_model", None)
    if model is None:
        return f"object {caller.__module__}.{caller.__qualname__}"
    label: str = model._meta.label_lower
    return "user" if label == user_model.lower() else label


def _no_primary_key(user: Any) -> ImproperlyConfigured:
    return ImproperlyConfigured(
        f"The user of this request, {type(user).__name__}, has no primary key that tells it "
        "from other callers. Give the idempotency policy a principal= that names it."
    )


# From an answer to a payload and back.


def rendered(response: HttpResponseBase) -> HttpResponseBase:
    """The response, with its content: a template or a serializer's data are rendered now."""
    return response.render() if hasattr(response, "render") else response


def response_of(payload: Payload, policy: Policy) -> HttpResponse:
    """The stored answer: the same status, headers and bytes, marked as a replay."""
    status = policy.replay_status.get(payload.status, payload.status)
    response = HttpResponse(payload.body, status=status)
    del response["Content-Type"]  # HttpResponse's own; the stored one follows, if there was one
    for name, value in payload.sent_headers:
        response[name] = value
    if response.has_header("Location") and 300 <= status < 400:
        response.url = response["Location"]  # type: ignore[attr-defined]  # as redirects have it
    reason = dict(payload.headers).get(REASON)
    if reason and status == payload.status:
        response.reason_phrase = reason
    response[conf.replayed_header] = "true"
    return response


def problem_of(error: IdempotencyError) -> dict[str, Any]:
    """The members of a problem (RFC 9457) that explains the error to the client."""
    return {
        "type": f"{conf.docs_url}{error.slug}",
        "title": error.title,
        "status": status_of(error),
        "detail": error.detail,
    }


def status_of(error: IdempotencyError) -> int:
    """The HTTP status of an error: the ``STATUS_CODES`` setting's, or its own."""
    return conf.status_codes.get(error.slug, error.status)


def problem_response(error: IdempotencyError) -> HttpResponse:
    """The problem as ``application/problem+json``."""
    response = HttpResponse(
        json.dumps(problem_of(error)),
        status=status_of(error),
        content_type="application/problem+json",
    )
    if error.retry_after is not None:
        response["Retry-After"] = str(error.retry_after)
    return response
