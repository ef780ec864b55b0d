"""What is stored of a response, the response that is made of what was stored, and refusals.

``Idempotency-Status``: what became of a request, for the program that sent it.

The value is an item of RFC 9651, a token with parameters: ``executed; ttl=86399``. The tokens:

===============  ================================================================================
``executed``     the view ran. ``ttl``: for so many seconds, a retry gets this response;
                 ``stored=?0``: no retry gets it
``replayed``     the response of an earlier request; ``ttl`` likewise, and the ``attempt`` it is of
``not-replayed`` the operation was executed earlier, and its response cannot be given
``in-progress``  another request executes the operation
``held``         the operation waits for an operator
``expired``      the operation was executed earlier; its response has expired, and its key has not
``mismatch``     the key was used for another request
``refused``      the key cannot be used
``failed``       an error ended the request; its problem says what is known
===============  ================================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from django.forms import BaseForm, BaseFormSet
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.translation import gettext

from ..conf import conf
from ..engine import Result
from ..engine.outcomes import describe_error
from ..errors import (
    FingerprintMismatch,
    IdempotencyError,
    KeyMissing,
    KeyRefused,
    OperationInProgress,
)
from ..logs import escaped
from ..policy import NEVER_STORED, Policy
from ..stores.records import Operation, Payload, Record

REPLAYED_HEADER: Final = "Idempotent-Replayed"
"""The response header that is ``true`` on a replay."""

STATUS_HEADER: Final = "Idempotency-Status"
"""The response header that says what became of a request with a key."""


def executed(operation: Operation, elapsed: float) -> str:
    """The status of a response that this request has stored.

    Args:
        operation: what was executed.
        elapsed: seconds since before the operation was claimed.
    """
    if operation.ttl is None:
        return "executed"
    left = operation.ttl.total_seconds() - elapsed
    return f"executed; ttl={max(0, int(left))}"


def replayed(record: Record) -> str:
    """The status of a replay."""
    ttl = "" if record.ttl_left is None else f"; ttl={max(0, int(record.ttl_left))}"
    return f"replayed{ttl}; attempt={record.attempt}"


def render(response: object, request: HttpRequest, *, later: bool = False) -> HttpResponseBase:
    """The response, with its content: a template or a serializer's data are rendered now.

    Args:
        response: what a view, or a callable of its policy, has returned.
        request: the request.
        later: leave that to the framework.

    Raises:
        TypeError: it is no response.
    """
    if not isinstance(response, HttpResponseBase):
        raise TypeError(
            f"The view of {escaped(request.path)}, or a callable of its policy, returned "
            f"{type(response).__name__}, not an HttpResponse."
        )
    return response.render() if hasattr(response, "render") and not later else response


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


NEVER_STORED_HEADERS: Final = frozenset(
    # Of one message or connection (RFC 9110, section 7.6.1) …
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    "transfer-encoding upgrade content-length date server age via "
    # … or of one request and its session.
    "set-cookie x-request-id request-id x-correlation-id traceparent tracestate server-timing "
    "x-runtime".split()
)
"""The response headers, in lower case, that are never stored; a replay gets new ones."""


def result_of(request: HttpRequest, policy: Policy, response: HttpResponseBase) -> Result:
    """The result for the engine: the response, and the payload to store or the reason for storing
    none.
    """
    unwanted = reason_not_to_store(request, policy, response)
    if unwanted:
        return Result(response, None, error=unwanted, failed=response.status_code >= 500)
    return Result(response, payload_of(response, policy))


def reason_not_to_store(request: HttpRequest, policy: Policy, response: HttpResponseBase) -> str:
    """The reason for storing nothing of a response; empty: it is stored."""
    status = response.status_code
    if status >= 500:
        return f"The response had the status {status}."
    wanted = policy.should_store and policy.should_store(request, response)
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
    headers, media_type = [], ""
    for name, value in response.items():
        if name.lower() not in NEVER_STORED_HEADERS:
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


def result_of_error(
    request: HttpRequest, policy: Policy, response: HttpResponseBase, error: Exception
) -> Result:
    """The result for the engine of a view's error; its payload is made after the rollback."""

    def payload() -> Payload:
        return payload_of(render(response, request), policy)

    status, should_store = response.status_code, policy.should_store
    is_kept = 400 <= status < 500 and should_store is not None and should_store(request, response)
    kept = payload if is_kept else None
    return Result(
        response, kept, error=describe_error(error), failed=kept is None and status >= 500
    )


# Refusals: a problem of RFC 9457 ("ietf"), or an error as Stripe sends it. IDEMPOTENCY["DIALECT"]
# chooses.


def _problem(error: IdempotencyError, status: int) -> dict[str, Any]:
    """The members of a problem that explains the error to a person and to a program."""
    return {
        "type": f"{conf.docs_url}{error.slug}",
        "title": gettext(error.title),
        "status": status,
        "detail": error.detail,
        "code": error.slug,
        "state": error.state,
        "retryable": error.retryable,
        "safe_new_key": error.safe_new_key,
    }


def _stripe_error(error: IdempotencyError, status: int) -> dict[str, Any]:
    """An error of Stripe's API; what Stripe has no code for has its slug as the code."""
    kind, code = "invalid_request_error", error.slug.replace("-", "_")
    if status >= 500:
        kind = "api_error"
    elif isinstance(error, FingerprintMismatch | KeyRefused):
        kind = "idempotency_error"
    elif isinstance(error, OperationInProgress):
        kind, code = "idempotency_error", "idempotency_key_in_use"
    return {"error": {"type": kind, "message": error.detail, "code": code}}


_FORMATS: Final = {
    "ietf": ("application/problem+json", _problem),
    "stripe": ("application/json", _stripe_error),
}
_STATUSES: Final = {"ietf": {}, "stripe": {FingerprintMismatch.slug: 400}}


def media_type() -> str:
    """The media type of a refusal."""
    return _FORMATS[conf.dialect][0]


def status_of(error: IdempotencyError | type[IdempotencyError]) -> int:
    """The HTTP status of an error: the ``STATUS_CODES`` setting's, the dialect's, or its own."""
    usual = _STATUSES[conf.dialect].get(error.slug, error.status)
    return conf.status_codes.get(error.slug, usual)


def error_body(error: IdempotencyError) -> dict[str, Any]:
    """The data of the JSON body that explains an error."""
    return _FORMATS[conf.dialect][1](error, status_of(error))


def retry_after() -> int:
    """The seconds of the ``Retry-After`` of an operation in progress."""
    return max(1, math.ceil(conf.retry_after.total_seconds()))


def problem_response(error: IdempotencyError) -> HttpResponse:
    """The response of a refusal, in the project's dialect."""
    response = HttpResponse(
        json.dumps(error_body(error)), status=status_of(error), content_type=media_type()
    )
    if error.retry_after is not None:
        response["Retry-After"] = str(error.retry_after)
    return response


def marked(response: HttpResponseBase, error: IdempotencyError) -> HttpResponseBase:
    """The refusal, whose headers say what became of the request, if it had a key."""
    if not isinstance(error, KeyMissing):
        response[STATUS_HEADER] = error.token
    if conf.dialect == "stripe":
        response["Stripe-Should-Retry"] = "true" if error.retryable else "false"
    return response
