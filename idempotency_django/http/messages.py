"""HTTP as plain values: reads the key header, turns responses into payloads, and back."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.forms import BaseForm, BaseFormSet
from django.http import HttpRequest, HttpResponse
from django.http.request import HttpHeaders, split_domain_port
from django.http.response import HttpResponseBase

from ..conf import conf, until_settings_change
from ..engine import Result
from ..engine.context import ExecutionContext
from ..engine.outcomes import describe_error
from ..errors import IdempotencyError, KeyMissing, KeyRefused, ResponseNotStored
from ..policy import NEVER_STORED, UNSET, Policy, identity
from ..policy.digests import digest
from ..policy.invocation import Body, Invocation
from ..stores.records import Payload, Record
from .bodies import body_of
from .dialects import dialect
from .marking import mark
from .routes import name_of_route

if TYPE_CHECKING:
    from rest_framework.request import Request as _Request  # to a type checker, one of Django's
else:
    _Request = HttpRequest


class IdempotentRequest(_Request):
    """The request of a protected view, for type checkers; of Django and of REST framework.

    ::

        @idempotent(required=True, mode="leased")
        def pay(request: IdempotentRequest) -> HttpResponse:
            charge_id = request.idempotency.step("charge", charge)

    Attributes:
        idempotency: the attempt that runs. Without a key it is ``None``: where the policy does not
            require one, look first.
    """

    idempotency: ExecutionContext


# From a request to a call.


def invocation_of(
    request: HttpRequest,
    policy: Policy | None = None,
    *,
    own: Any = None,
    user: Any = UNSET,
    auth: Any = None,
    body: Callable[[], Body] | None = None,
    raw: Callable[[], Body] | None = None,
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
        raw: reads it without the framework's parser.
        authorization: who is calling if no principal is known; ``None``: the sender of the
            request's ``Authorization`` header.

    Raises:
        ImproperlyConfigured: a caller has authenticated, and nothing says which.
    """
    own = own or request
    user = getattr(own, "user", None) if user is UNSET else user
    # The token itself is no name: a client may have another one for its retry.
    is_token = isinstance(auth, str) and auth in request.META.get(_AUTHORIZATION, "").split()
    try:
        principal = principal_of(user, None if is_token else auth)
    except ImproperlyConfigured:
        if policy is None or not policy.principal:
            raise
        principal = ""  # the policy knows better
    if authorization is None:
        authorization = "" if principal else authorization_of(request)
    if auth and not (principal or authorization) and policy and policy.principal is None:
        raise _no_caller(request, auth)
    if auth is not None and not authorization:
        authorization = _UNKNOWN  # nobody is known to have made it
    return Invocation(
        name=operation_name(request),
        principal=principal,
        authorization="" if principal else authorization,
        host=host_of(request),
        method=request.method or "",
        path=request.path,
        query=request.META.get("QUERY_STRING", ""),
        media_type=(request.content_type or "").lower(),
        read=body or partial(body_of, request),
        read_raw=raw,
        request=own,
    )


def _no_caller(request: HttpRequest, auth: Any) -> ImproperlyConfigured:
    return ImproperlyConfigured(
        f"The authentication of {operation_name(request)} returned {type(auth).__name__!r}, which "
        "identifies no caller, and it did not read the Authorization header, so a replay could be "
        "another caller's. Return a user, a model instance or text. Or give the idempotency policy "
        "a principal=."
    )


_AUTHORIZATION: Final = "HTTP_AUTHORIZATION"
_UNKNOWN: Final = "unknown"


def callers_of(request: HttpRequest, user: Any, auth: Any = None) -> set[str]:
    """The names that records have for the sender of this request; see :func:`principal_of`."""
    try:
        principal = principal_of(user, auth)
    except ImproperlyConfigured:  # only the principal= of a policy knows such a user
        principal = ""
    return {principal, *identity.owners_of(authorization_of(request))} - {""}


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


def operation_name(request: HttpRequest) -> str:
    """The method and the route, ``"POST /orders/<int:pk>/pay/"``: stable when code moves."""
    match = request.resolver_match
    route = name_of_route(match.route) if match and match.route is not None else request.path
    return f"{request.method} {route}"


def principal_of(user: Any, auth: Any = None) -> str:
    """The caller's name, ``"user:42"``; empty for unauthenticated callers.

    Args:
        user: the request's user.
        auth: what authenticated the request where there is no user, for example an API key. Only a
            digest of it is used, because it may be a secret. What has no primary key, the claims
            of a token for example, is not a caller.

    Raises:
        ImproperlyConfigured: the user has no primary key.
    """
    if user is not None and getattr(user, "is_authenticated", False):
        pk = getattr(user, "pk", None)
        if pk is None:
            raise ImproperlyConfigured(
                f"The user of this request, {type(user).__name__}, has no primary key to identify "
                "it. Give the idempotency policy a principal= that identifies it."
            )
        # Of its class: a lazy user only looks like one.
        return f"{_kind(user.__class__)}:{pk}"
    if isinstance(auth, str | bytes):
        return f"auth:{digest(auth)}"
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


# From a response to a payload and back.


def render(response: HttpResponseBase) -> HttpResponseBase:
    """The response, with its content: a template or a serializer's data are rendered now."""
    return response.render() if hasattr(response, "render") else response


def response_of(
    payload: Payload, response_class: Callable[..., HttpResponse] = HttpResponse
) -> HttpResponse:
    """The response that a payload describes.

    Args:
        payload: its status, headers and bytes.
        response_class: makes it.
    """
    headers = dict(payload.headers)
    response = response_class(payload.body, status=payload.status, headers=headers)
    if "content-type" not in map(str.lower, headers):
        del response["Content-Type"]  # HttpResponse's own
    if 300 <= payload.status < 400 and response.has_header("Location"):
        response.url = response["Location"]  # type: ignore[attr-defined]  # as redirects have it
    return response


REPLAYED_HEADER: Final = "Idempotent-Replayed"
"""The response header that is ``true`` on a replay."""


PLANNED: Final = "_idempotency_planned"
"""The attribute of a request that had a key, sent or derived."""


def mark_refusal(response: HttpResponseBase, request: HttpRequest, error: IdempotencyError) -> None:
    """Say in the headers of a refusal what became of the request.

    Args:
        response: the response.
        request: its request.
        error: why the request is refused.
    """
    refuses_key = isinstance(error, KeyRefused) and not isinstance(error, KeyMissing)
    if refuses_key or key_header(request) is not None or hasattr(request, PLANNED):
        mark(response, error.token)
    if dialect().retry_header:
        response[dialect().retry_header] = "true" if error.retryable else "false"


def status_of(error: IdempotencyError | type[IdempotencyError]) -> int:
    """The HTTP status of an error: the ``STATUS_CODES`` setting's, the dialect's, or its own."""
    usual = dialect().statuses.get(error.slug, error.status)
    return conf.status_codes.get(error.slug, usual)


def error_body(error: IdempotencyError) -> dict[str, Any]:
    """The data of the body that explains an error: a problem, or the dialect's."""
    return dialect().error_body(error, status_of(error))


def retry_after() -> int:
    """The seconds of the ``Retry-After`` of an operation in progress."""
    return max(1, math.ceil(conf.retry_after.total_seconds()))


def problem_response(error: IdempotencyError) -> HttpResponse:
    """The problem as ``application/problem+json``, or the error as the dialect says it."""
    response = HttpResponse(
        json.dumps(error_body(error)),
        status=status_of(error),
        content_type=dialect().media_type,
    )
    if error.retry_after is not None:
        response["Retry-After"] = str(error.retry_after)
    return response


class Adapter(ABC):
    """One request and its response, as an adapter's framework handles them.

    Attributes:
        http_request: Django's request.
        request: the request as the framework's own views know it.
        method: the request's method.
        run: runs the view.
        policy: the view's policy, resolved; it is known from :func:`~.serving.serve` on.
        response_class: makes the responses of this package, of the bytes, the status and the
            headers.
    """

    response_class: Callable[..., HttpResponse] = HttpResponse

    http_request: HttpRequest
    request: Any
    method: str
    run: Callable[[], Any]
    policy: Policy

    def header(self) -> str | None:
        """The key as the client sent it; ``None`` when it sent none."""
        return key_header(self.http_request)

    def invocation(self) -> Invocation:
        """The invocation that the request is, for its policy."""
        return invocation_of(self.http_request, self.policy)

    def scope(self) -> str | None:
        """The scope that the key is unique in, if the policy does not decide it."""
        return None

    @abstractmethod
    def respond(self) -> HttpResponseBase:
        """Run the view and render its response."""

    async def arespond(self) -> HttpResponseBase:
        """The same, of an async view."""
        raise NotImplementedError

    def pass_through(self) -> Any:
        """What the view returns to its framework, which nothing here touches; awaitable if it is
        async.
        """
        return self.run()

    @abstractmethod
    def recover(self, error: Exception) -> HttpResponseBase:
        """The response to the view's error, rendered or not; or raise the error again."""

    def rebuild(self, record: Record) -> HttpResponseBase:
        """The response of a record whose body was not kept.

        Raises:
            ResponseNotStored: there is no way to build it again.
        """
        if self.policy.rebuild is None:
            raise ResponseNotStored
        response: HttpResponseBase = self.policy.rebuild(record, self.http_request)
        return response

    def can_rebuild(self) -> bool:
        """Whether a response whose body was not kept can be built again."""
        return self.policy.rebuild is not None

    def problem(self, error: IdempotencyError) -> HttpResponseBase:
        """The response of a refusal."""
        return problem_response(error)

    def authorize(self, record: Record) -> None:
        """Raise to refuse a replay to a caller who would be refused with a new key."""
        check = self.policy.check_replay
        if check is not None:
            refuse_result(check(self.request, record), "check_replay of a policy")


def refuse_result(result: object, name: str) -> None:
    """Refuse a result of a replay check: ``False``, for example, would let everybody pass.

    Raises:
        TypeError: it returned something.
    """
    if result is not None:
        raise TypeError(
            f"The {name} returned {result!r}. It must return None, or raise PermissionDenied to "
            "refuse a replay."
        )


NEVER_STORED_HEADERS: Final = frozenset(
    # Of one message or connection (RFC 9110, section 7.6.1) …
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    "transfer-encoding upgrade content-length date server age via "
    # … or of one request and its session.
    "set-cookie x-request-id request-id x-correlation-id traceparent tracestate server-timing "
    "x-runtime".split()
)
"""The response headers, in lower case, that are never stored; a replay gets new ones."""


def result_of(adapter: Adapter, response: HttpResponseBase) -> Result:
    """The result for the engine: the response, and the payload to store or the reason for storing
    none.
    """
    unwanted = reason_not_to_store(adapter, response)
    if unwanted:
        return Result(response, None, error=unwanted, failed=response.status_code >= 500)
    return Result(response, payload_of(response, adapter.policy))


def reason_not_to_store(adapter: Adapter, response: HttpResponseBase) -> str:
    """The reason for storing nothing of a response; empty: it is stored."""
    status = response.status_code
    if status >= 500:
        return f"The response had the status {status}."
    if adapter.policy.should_store is not None:
        wanted = _wanted(adapter, response)
        if wanted is not None:
            return "" if wanted else "The policy's should_store= rejected this response."
    if status in NEVER_STORED:
        return f"The response had the status {status}."
    context = getattr(response, "context_data", None)
    if isinstance(context, Mapping) and _has_refused_form(context):
        return "The response contains a form with errors."
    return ""


def payload_of(response: HttpResponseBase, policy: Policy) -> Payload:
    """The payload of a response; a tombstone if it was streamed, is too large, or is a page."""
    unwanted: frozenset[str] = NEVER_STORED_HEADERS
    if conf.exclude_headers:
        unwanted = unwanted.union(name.lower() for name in conf.exclude_headers)
    headers, media_type = [], ""
    for name, value in response.items():
        if name.lower() not in unwanted:
            headers.append((name, value))
        if name.lower() == "content-type":
            media_type = value.lower()
    status, body = response.status_code, None
    if isinstance(response, HttpResponse):
        content = response.content
        # A page may show its visitor's name, CSRF token or nonce. Redirects and empty responses
        # carry the type of one, and show nothing.
        is_page = media_type.startswith("text/html") and content and not 300 <= status < 400
        if not is_page and len(content) <= policy.max_response_bytes:
            body = content
    return Payload(status, tuple(headers), body)


def _has_refused_form(context: Mapping[str, Any]) -> bool:
    """Whether the context of a page has a form, or a formset, with errors."""
    return any(
        isinstance(form, BaseForm | BaseFormSet) and form.is_bound and not form.is_valid()
        for form in context.values()
    )


def _wanted(adapter: Adapter, response: HttpResponseBase) -> bool | None:
    """Whether the policy stores a response; ``None``: it does not say."""
    should_store = adapter.policy.should_store
    wanted = should_store and should_store(adapter.http_request, response)
    if wanted is None or isinstance(wanted, bool):
        return wanted
    raise ImproperlyConfigured(
        f"The should_store of an idempotency policy returned a {type(wanted).__name__}; it must "
        "return True, False or None."
    )


def result_of_error(adapter: Adapter, response: HttpResponseBase, error: Exception) -> Result:
    """The result for the engine of a view's error; its payload is made after the rollback."""

    def payload() -> Payload:
        return payload_of(render(response), adapter.policy)

    status = response.status_code
    kept = payload if 400 <= status < 500 and _wanted(adapter, response) else None
    return Result(
        response, kept, error=describe_error(error), failed=kept is None and status >= 500
    )
