"""What a refusal looks like: a problem of RFC 9457 (``"ietf"``), or an error as Stripe sends it.

``IDEMPOTENCY["DIALECT"]`` chooses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.translation import gettext

from ..conf import conf
from ..errors import (
    FingerprintMismatch,
    IdempotencyError,
    KeyMissing,
    KeyRefused,
    OperationInProgress,
)
from .invocations import key_header
from .marking import mark


@dataclass(frozen=True, kw_only=True, eq=False)
class ErrorFormat:
    """How an API refuses a request.

    Attributes:
        error_body: called with an error and its status; returns the data of the JSON body.
        media_type: the media type of that body.
        statuses: the status of an error, by the slug of its problem, where it is not the error's
            own. ``IDEMPOTENCY["STATUS_CODES"]`` comes before it.
        retry_header: the response header that is ``true`` if the same request can succeed later,
            else ``false``; empty: there is none.
    """

    error_body: Callable[[IdempotencyError, int], dict[str, Any]]
    media_type: str
    statuses: Mapping[str, int] = field(default_factory=dict)
    retry_header: str = ""


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


FORMATS: Final = {
    "ietf": ErrorFormat(error_body=_problem, media_type="application/problem+json"),
    "stripe": ErrorFormat(
        error_body=_stripe_error,
        media_type="application/json",
        statuses={"mismatch": 400},
        retry_header="Stripe-Should-Retry",
    ),
}


def error_format() -> ErrorFormat:
    """The format of the project."""
    return FORMATS[conf.dialect]


def status_of(error: IdempotencyError | type[IdempotencyError]) -> int:
    """The HTTP status of an error: the ``STATUS_CODES`` setting's, the format's, or its own."""
    usual = error_format().statuses.get(error.slug, error.status)
    return conf.status_codes.get(error.slug, usual)


def error_body(error: IdempotencyError) -> dict[str, Any]:
    """The data of the body that explains an error: a problem, or the format's."""
    return error_format().error_body(error, status_of(error))


def retry_after() -> int:
    """The seconds of the ``Retry-After`` of an operation in progress."""
    return max(1, math.ceil(conf.retry_after.total_seconds()))


def problem_response(error: IdempotencyError) -> HttpResponse:
    """The problem as ``application/problem+json``, or the error in the format of the project."""
    response = HttpResponse(
        json.dumps(error_body(error)),
        status=status_of(error),
        content_type=error_format().media_type,
    )
    if error.retry_after is not None:
        response["Retry-After"] = str(error.retry_after)
    return response


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
    if error_format().retry_header:
        response[error_format().retry_header] = "true" if error.retryable else "false"
