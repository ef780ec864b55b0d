"""From a request to an invocation: what is asked for, and who is calling."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.http.request import HttpHeaders, split_domain_port
from django.utils.encoding import force_str

from ..conf import conf, until_settings_change
from ..policy import UNSET, Policy
from ..policy.digests import digest
from ..policy.invocation import Body, Invocation
from .bodies import body_of


def invocation_of(
    request: HttpRequest,
    policy: Policy,
    *,
    own: Any = None,
    user: Any = UNSET,
    auth: Any = None,
    body: Callable[[], Body] | None = None,
    authorization: str | None = None,
) -> Invocation:
    """The invocation that a request is, for its policy.

    Args:
        request: Django's request.
        policy: the policy, which may know who is calling.
        own: the request as the framework's own views know it.
        user: the caller, if that is not the request's user.
        auth: the authentication of the request, if the framework reports it.
        body: reads the body, if the framework does so in its own way.
        authorization: who is calling if no principal is known; ``None``: the sender of the
            request's ``Authorization`` header.

    Raises:
        ImproperlyConfigured: a caller has authenticated, and nothing says which.
    """
    own = own or request
    user = getattr(own, "user", None) if user is UNSET else user
    # The token itself is no name: a client may have another one for its retry. That of
    # django-oauth-toolkit is a row which names the client.
    caller = getattr(auth, "application", None) or auth
    is_text = isinstance(caller, str | bytes)
    if is_text and force_str(caller, errors="replace") in request.META.get(_AUTHORIZATION, ""):
        caller = None
    principal = principal_of(user, caller)
    if not principal:
        authorization = authorization_of(request) if authorization is None else authorization
        is_user = getattr(user, "is_authenticated", False)
        unnamed = user if is_user else (None if authorization else auth)
        if unnamed is not None:
            _refuse_unnamed(request, policy, unnamed)
            authorization = authorization or _UNKNOWN  # so it is no anonymous request
    return Invocation(
        name=operation_name(request),
        principal=principal,
        authorization="" if principal else authorization or "",
        host=host_of(request),
        method=request.method or "",
        path=request.path,
        query=request.META.get("QUERY_STRING", ""),
        media_type=(request.content_type or "").lower(),
        read=body or partial(body_of, request),
        request=own,
    )


def _refuse_unnamed(request: HttpRequest, policy: Policy, unnamed: object) -> None:
    """Refuse a caller whom nothing tells from others, unless the policy may know the caller."""
    if policy.principal is None:
        raise ImproperlyConfigured(
            f"The authentication of {operation_name(request)} returned {type(unnamed).__name__!r}, "
            "which has no primary key and is no text, so nothing identifies the caller, and a "
            "replay could be another caller's. Return a user, a model instance or text. If it "
            "reads the Authorization header, let its authenticate_header() return the scheme. Or "
            "give the idempotency policy a principal= that identifies the caller."
        )


_AUTHORIZATION: Final = "HTTP_AUTHORIZATION"
_UNKNOWN: Final = "unknown"


def authorization_of(request: HttpRequest) -> str:
    """A digest of the ``Authorization`` header of a request; empty if it has none.

    It is unverified: the view may refuse it, or ignore it.
    """
    sent = request.META.get(_AUTHORIZATION)
    return f"authorization:{digest(sent)}" if sent else ""


def host_of(request: HttpRequest) -> str:
    """The name of the request's host, in lower case and without a port.

    It is not checked against ``ALLOWED_HOSTS``: the view may not check it either.
    """
    meta = request.META
    host = meta.get("HTTP_X_FORWARDED_HOST") if settings.USE_X_FORWARDED_HOST else None
    return _without_port(host or meta.get("HTTP_HOST") or meta.get("SERVER_NAME", ""))


@lru_cache(maxsize=256)
def _without_port(host: str) -> str:
    return split_domain_port(host)[0] or host.lower()


def key_header(request: HttpRequest) -> str | None:
    """The value of the key header, as it was sent; ``None``: it was not. Nothing else reads it."""
    value: str | None = request.META.get(meta_name(conf.header))
    return value


meta_name = lru_cache(HttpHeaders.to_wsgi_name)


_ROUTERS: Final = re.compile(r"\(\?P<(\w+)>\[\^/\.\]\+\)")
"""A parameter as REST framework's routers write it."""


def operation_name(request: HttpRequest) -> str:
    """The method and the route, ``"POST /orders/<int:pk>/pay/"``: stable when code moves."""
    match = request.resolver_match
    route = name_of_route(match.route) if match and match.route is not None else request.path
    return f"{request.method} {route}"


@lru_cache(maxsize=4096)
def name_of_route(route: str) -> str:
    """The route in an operation's name, unique for each route: as it is written.

    Only the expressions of REST framework's routers are easier to read: ``/charges/{pk}/``.
    """
    simple = _ROUTERS.sub(r"{\1}", route).replace("^", "")
    if simple.endswith("$") and not re.search(r"[.\\$()\[\]?*+|]", simple[:-1]):
        return f"/{simple[:-1]}"
    return f"/{route}"


def principal_of(user: Any, auth: Any = None) -> str:
    """The caller's name, ``"user:42"``; empty: nothing identifies the caller.

    Args:
        user: the request's user.
        auth: what authenticated the request where there is no user, for example an API key. Only a
            digest of it is used, because it may be a secret. What has no primary key, the claims
            of a token for example, is not a caller.
    """
    if getattr(user, "is_authenticated", False):
        pk = getattr(user, "pk", None)
        # Of its class: a lazy user only looks like one.
        return "" if pk is None else f"{_kind(user.__class__)}:{pk}"
    if isinstance(auth, str | bytes):
        return f"auth:{digest(auth)}" if auth else ""
    key = getattr(auth, "pk", None)
    if key is None:
        return ""
    return f"auth:{_kind(auth.__class__)}:{digest(str(key))}"


@until_settings_change
@lru_cache(maxsize=64)
def _kind(caller: type) -> str:
    """The kind of a caller, because kinds may share primary keys: ``"user"`` is the user model."""
    model = getattr(getattr(caller, "_meta", None), "concrete_model", None)
    if model is None:
        return f"object {caller.__module__}.{caller.__qualname__}"
    label: str = model._meta.label_lower
    return "user" if label == settings.AUTH_USER_MODEL.lower() else label
