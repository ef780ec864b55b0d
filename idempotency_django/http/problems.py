"""What a refusal looks like: a problem of RFC 9457 (``"ietf"``), or an error as Stripe sends it.

``IDEMPOTENCY["DIALECT"]`` chooses.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

from django.http import HttpResponse
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
from .responses import STATUS_HEADER


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
