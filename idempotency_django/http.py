"""Between HTTP and the engine: requests to calls, answers to payloads and back, problems.

What every HTTP adapter has in common is here, in :func:`serve`; an adapter adds how its framework
runs a view and what it makes of an exception.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from abc import ABC, abstractmethod
from io import BytesIO
from typing import Any, Final, cast

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.files.uploadedfile import UploadedFile as DjangoFile
from django.http import HttpRequest, HttpResponse, QueryDict
from django.http.request import HttpHeaders
from django.http.response import HttpResponseBase
from django.utils.datastructures import MultiValueDict

from . import engine, keys
from .conf import conf
from .engine import Answer, Executed, InProgress, Mismatched, Replayed
from .errors import (
    FingerprintMismatch,
    IdempotencyError,
    OperationInProgress,
    ResponseNotStored,
    StoreUnavailable,
)
from .fingerprints import digest
from .policy import Policy
from .records import Body, Call, Claim, Form, Operation, Payload, Record, UploadedFile
from .stores import stores
from .transactions import RequestTransactions

logger = logging.getLogger("idempotency_django")

NEVER_KEPT: Final = frozenset(
    # Of one message or connection (RFC 9110, section 7.6.1) …
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    "transfer-encoding upgrade content-length date server age via "
    # … or of one request and its session.
    "set-cookie x-request-id request-id x-correlation-id traceparent tracestate server-timing "
    "x-runtime".split()
)
"""Response headers, in lower case, that are never stored; a replay gets its own."""


# From a request to a call.


def call_of(request: HttpRequest) -> Call:
    """What the policy needs to know of a Django request."""
    return Call(
        name=operation_name(request),
        principal=principal_of(getattr(request, "user", None)),
        method=request.method or "",
        path=request.path,
        query=request.META.get("QUERY_STRING", ""),
        media_type=(request.content_type or "").lower(),
        body=body_of(request),
        header=key_header(request),
        request=request,
    )


def key_header(request: HttpRequest) -> str | None:
    """The value of the key header, as it was sent."""
    # Not request.headers, which makes a dict of all of them first.
    value: str | None = request.META.get(HttpHeaders.to_wsgi_name(conf.header))
    return value


def operation_name(request: HttpRequest) -> str:
    """The method and the route, ``"POST /orders/<int:pk>/pay/"``: stable when code moves."""
    match = request.resolver_match
    route = f"/{match.route}" if match and match.route is not None else request.path
    return f"{request.method} {route}"


def principal_of(user: Any, auth: Any = None) -> str:
    """Who is calling: ``"user:42"``; empty for callers who are not told apart.

    Args:
        user: the request's user.
        auth: what authenticated the request where there is no user: an API key, say. Of it only a
            digest is used, because it may be a secret.
    """
    if user is not None and getattr(user, "is_authenticated", False):
        return f"{_kind(user)}:{_primary_key('user', user)}"
    if auth is None:
        return ""
    if isinstance(auth, str | bytes):
        return f"auth:{digest(auth)}"
    return f"auth:{_kind(auth)}:{digest(str(_primary_key('auth', auth)))}"


def _kind(caller: Any) -> str:
    """What tells callers of equal primary keys apart: ``"user"`` is the project's user model."""
    model = getattr(getattr(caller, "_meta", None), "concrete_model", None)
    if model is None:
        return f"object {type(caller).__module__}.{type(caller).__qualname__}"
    label: str = model._meta.label_lower
    return "user" if label == settings.AUTH_USER_MODEL.lower() else label


def _primary_key(role: str, caller: Any) -> Any:
    key = getattr(caller, "pk", None)
    if key is None:
        raise ImproperlyConfigured(
            f"The {role} of this request, {type(caller).__name__}, has no primary key to tell it "
            "from others. Give the idempotency policy a scope= of your own."
        )
    return key


def body_of(request: HttpRequest) -> Body:
    """What was sent: forms by field and file, anything else byte for byte."""
    if request.content_type == "application/x-www-form-urlencoded":
        return form_of(QueryDict(request.body, encoding=request.encoding), MultiValueDict())
    if request.content_type != "multipart/form-data":
        return request.body
    if request.method == "POST":  # the only method whose forms Django parses itself
        return form_of(request.POST, request.FILES)
    return form_of(*request.parse_file_upload(request.META, BytesIO(request.body)))


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


# From an answer to a payload and back.


def payload_of(response: HttpResponseBase, policy: Policy) -> Payload:
    """What is kept of an answer; a tombstone of one that was streamed or is too large."""
    unwanted = NEVER_KEPT.union(name.lower() for name in policy.exclude_headers)
    headers = tuple(pair for pair in response.items() if pair[0].lower() not in unwanted)
    body = None
    if isinstance(response, HttpResponse) and policy.store_body:
        body = response.content if len(response.content) <= policy.max_response_bytes else None
    return Payload(response.status_code, headers, body)


def rendered(response: HttpResponseBase) -> HttpResponseBase:
    """The response, with its content: a template or a serializer's data are rendered now."""
    return response.render() if hasattr(response, "render") else response


def response_of(payload: Payload, policy: Policy) -> HttpResponse:
    """The stored answer: the same status, headers and bytes, marked as a replay."""
    status = policy.replay_status.get(payload.status, payload.status)
    response = HttpResponse(payload.body, status=status)
    del response["Content-Type"]  # HttpResponse's own; the stored one follows, if there was one
    for name, value in payload.headers:
        response[name] = value
    response[conf.replayed_header] = "true"
    return response


def problem_of(error: IdempotencyError) -> dict[str, Any]:
    """The members of a problem (RFC 9457) that tells the client what was wrong."""
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


# One request, through policy and engine.


class Exchange(ABC):
    """One request and its answer, as an adapter's framework handles them."""

    def __init__(self, request: HttpRequest) -> None:
        self.http_request = request

    def header(self) -> str | None:
        """The key as the client sent it; ``None`` when it sent none."""
        return key_header(self.http_request)

    def call(self) -> Call:
        """What the policy needs to know of the request."""
        return call_of(self.http_request)

    def scope(self) -> str | None:
        """What the key is unique in, where that is not for the policy to say."""
        return None

    @abstractmethod
    def respond(self) -> HttpResponseBase:
        """Run the view and render its answer."""

    @abstractmethod
    def recover(self, error: Exception, policy: Policy) -> HttpResponseBase:
        """The answer to what the view raised, rendered or not, or the error again."""

    def rebuild(self, record: Record, policy: Policy) -> HttpResponseBase:
        """The answer of a record whose body was not kept.

        Raises:
            ResponseNotStored: nobody knows how to make it.
        """
        if policy.rebuild is None:
            raise ResponseNotStored
        response: HttpResponseBase = policy.rebuild(record, self.http_request)
        return response


def unclaimed(request: HttpRequest) -> bool:
    """Give the request its ``idempotency``, ``None`` so far; ``False``: it has a claim already."""
    claim = getattr(request, "idempotency", None)
    request.idempotency = claim  # type: ignore[attr-defined]  # ours, for the view
    return claim is None


def serve(
    exchange: Exchange, policy: Policy, transactions: RequestTransactions | None = None
) -> HttpResponseBase:
    """Answer a request: run its view once per operation, replay, or refuse.

    A view that is already being run for a claimed operation is just run.

    Args:
        exchange: the request, as its adapter handles it.
        policy: the view's policy, resolved.
        transactions: what the adapter opened around the request.

    Raises:
        IdempotencyError: the request is refused; nothing was executed, or all was rolled back.
    """
    method = exchange.http_request.method or ""
    if not unclaimed(exchange.http_request) or method not in policy.methods:
        return exchange.respond()
    key = policy.client_key_of(exchange.header())
    if key is None and policy.key is None:
        policy.refuse_missing(method)
        return exchange.respond()
    call = exchange.call()
    derived = key is None
    if key is None:
        key = policy.derived_key_of(call)
    if key is None:
        policy.refuse_missing(method)
        return exchange.respond()
    if not derived:
        policy.refuse_guessable(call, key)
    operation = policy.operation_for(call, key=key, scope=exchange.scope())
    response = _through_engine(exchange, policy, operation, transactions)
    if derived:
        response[conf.header] = keys.quoted(key)
    return response


def _through_engine(
    exchange: Exchange,
    policy: Policy,
    operation: Operation,
    transactions: RequestTransactions | None,
) -> HttpResponseBase:
    store = stores[policy.store]

    def execute(claim: Claim) -> Answer:
        exchange.http_request.idempotency = claim  # type: ignore[attr-defined]
        return _answer(exchange.respond(), policy)

    def recover(error: Exception) -> Answer:
        if isinstance(error, IdempotencyError):
            raise error  # ours, not the view's
        return _answer_to_error(exchange.recover(error, policy), error, policy)

    retry_after = max(1, math.ceil(policy.retry_after.total_seconds()))
    try:
        outcome = engine.run(
            store,
            policy,
            operation,
            execute,
            recover,
            after=transactions.around(store) if transactions else None,
        )
    except IdempotencyError as error:
        if error.status >= 500:
            logger.exception("%s could not be made safe to retry.", operation.name)
        if isinstance(error, OperationInProgress | StoreUnavailable):
            error.retry_after = retry_after
        raise
    match outcome:
        case Executed(response):
            return cast("HttpResponseBase", response)
        case Replayed(record):
            return _replay(exchange, policy, record)
        case InProgress():
            raise OperationInProgress(retry_after=retry_after)
        case Mismatched():
            raise FingerprintMismatch


def _replay(exchange: Exchange, policy: Policy, record: Record) -> HttpResponseBase:
    payload = record.payload
    if payload is None or payload.body is None:
        response = exchange.rebuild(record, policy)
        response[conf.replayed_header] = "true"
        return response
    return response_of(payload, policy)


def _answer(response: HttpResponseBase, policy: Policy) -> Answer:
    status = response.status_code
    if policy.keeps(status):
        return Answer(response, payload_of(response, policy))
    return Answer(response, None, error=f"The answer was {status}.", failed=status >= 500)


def _answer_to_error(response: HttpResponseBase, error: Exception, policy: Policy) -> Answer:
    def payload() -> Payload:
        return payload_of(rendered(response), policy)

    status = response.status_code
    kept = payload if policy.keeps_raised(status) else None
    reason = f"{type(error).__name__}: {error}"
    return Answer(response, kept, error=reason, failed=kept is None and status >= 500)
