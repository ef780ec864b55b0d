"""From a request to an invocation: what is asked for, who is calling, and the body.

The body is read as ``request.body``, so Django hands it on to a view that parses the form, sets
upload handlers, takes ``request.body`` or streams. A body of more than
``DATA_UPLOAD_MAX_MEMORY_SIZE`` or of an unknown length is left to the view alone.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from functools import lru_cache, partial
from io import BytesIO
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured, SuspiciousOperation
from django.core.files.uploadedfile import UploadedFile as DjangoFile
from django.core.files.uploadhandler import MemoryFileUploadHandler
from django.http import HttpRequest, QueryDict, UnreadablePostError
from django.http.multipartparser import MultiPartParser
from django.http.request import HttpHeaders, split_domain_port
from django.utils.datastructures import MultiValueDict
from django.utils.encoding import force_str

from ..conf import conf, until_settings_change
from ..logs import escaped
from ..policy import UNSET, Policy
from ..policy.digests import digest
from ..policy.invocation import Body, Form, Invocation, Unread, UploadedFile


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


# The body: it is read for the fingerprint, and the view can still read all of it.


MULTIPART: Final = "multipart/form-data"
URLENCODED: Final = "application/x-www-form-urlencoded"


def body_of(request: Any, parsed: Callable[[], Body] | None = None) -> Body:
    """The body of a request: a form by field and file, anything else byte for byte.

    Args:
        request: Django's request.
        parsed: returns what a framework has made of a body that it has read already.

    Raises:
        ImproperlyConfigured: the stream was read before, and it cannot be read again.
        UnreadablePostError: its end is missing.
    """
    if request._read_started and not hasattr(request, "_body"):  # its bytes are gone
        return parsed() if parsed else _parsed_before(request)
    if _is_too_large(request):
        return Unread(request.headers.get("Content-Digest", ""))
    raw = _raw_body_of(request)
    if request.content_type == MULTIPART:
        return _multipart(request, raw)
    if request.content_type == URLENCODED and not raw.startswith((b"{", b"[")):  # JSON of curl -d
        try:
            return form_of(QueryDict(raw, encoding=request.encoding), MultiValueDict())
        except (SuspiciousOperation, LookupError):
            return raw  # too many fields, or no such charset: the view's to refuse, if it looks
    return raw


def _is_too_large(request: Any) -> bool:
    """Whether a body is larger than what Django has in memory, or of no known length."""
    if hasattr(request, "_body"):
        return False
    meta, limit = request.META, settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    length = meta.get("CONTENT_LENGTH")
    # In ASGI, all of the body has come already. The stream of Django's test client cannot seek.
    if not length and "wsgi.input" not in meta and request._stream.seekable():
        length = str(request._stream.seek(0, os.SEEK_END))
        request._stream.seek(0)
    elif not length:
        length = "unknown" if "HTTP_TRANSFER_ENCODING" in meta else "0"
    return not length.isdecimal() or (limit is not None and int(length) > limit)


def _raw_body_of(request: Any) -> bytes:
    """The bytes of a body that is not too large; the view can read them again.

    Raises:
        UnreadablePostError: its end is missing, which some servers hand on when a client breaks
            off.
    """
    body: bytes = request.body
    length = int(request.META.get("CONTENT_LENGTH") or 0)
    if len(body) < length:
        raise UnreadablePostError(
            f"Only {len(body)} of the {length} bytes of the body of {request.method} "
            f"{escaped(request.path)} have arrived, so nothing was executed. The client has "
            "closed the connection."
        )
    if "wsgi.input" in request.META:  # where some views stream from
        request.META["wsgi.input"] = BytesIO(body)
    return body


class _InMemory(MemoryFileUploadHandler):
    """Keeps every file in memory, as the whole body is."""

    def handle_raw_input(self, *args: Any, **kwargs: Any) -> None:
        self.activated = True


def _multipart(request: Any, raw: bytes) -> Form | bytes:
    """The form by field and file, without making use of the request's own upload handlers."""
    # The length that was sent may be missing: then the view sees an empty form, but a view that
    # streams the body sees all of it.
    meta = {**request.META, "CONTENT_LENGTH": len(raw)}
    try:
        parser = MultiPartParser(meta, BytesIO(raw), [_InMemory()], request.encoding)
        return form_of(*parser.parse())
    except Exception:  # noqa: BLE001  # no form, or a large one: the view meets it, if it parses it
        return raw


def _parsed_before(request: HttpRequest) -> Form:
    """The form that the CSRF middleware has read, or django-ninja's one for PUT and PATCH."""
    if request.content_type == MULTIPART:
        # Django seals the handlers when it parses. What it has parsed is of use if it is kept.
        parsed = isinstance(request.upload_handlers, tuple) and hasattr(request, "_post")
        if parsed or request.POST or request.FILES:
            return form_of(request.POST, request.FILES)
    raise unreadable(request)


def unreadable(request: HttpRequest) -> ImproperlyConfigured:
    """The error of a body that was read, and cannot be compared with a retry's."""
    return ImproperlyConfigured(
        f"The body of {request.method} {escaped(request.path)} was read as a stream before the "
        "idempotency key was looked up, so the request cannot be compared with a retry. Protect "
        "the view outside the code that reads the body, or give its policy "
        "fingerprint=fingerprints.without_body."
    )


def form_of(fields: Any, files: MultiValueDict[str, Any]) -> Form:
    """A form from Django's own parts of it; the files can be read again afterwards."""
    texts = {
        name: [str(value) for value in values if not isinstance(value, DjangoFile)]
        for name, values in fields.lists()
    }
    return Form(
        {name: values for name, values in texts.items() if values},
        tuple(_uploaded(name, file) for name, group in files.lists() for file in group),
    )


def _uploaded(field: str, file: Any) -> UploadedFile:
    sha256 = hashlib.sha256()
    for chunk in file.chunks():
        sha256.update(chunk)
    file.seek(0)
    return UploadedFile(
        field=field,
        name=file.name or "",
        media_type=file.content_type or "",
        size=file.size or 0,
        sha256=sha256.hexdigest(),
    )
