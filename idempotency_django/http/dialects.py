"""What a refusal looks like: a problem of RFC 9457 (``"ietf"``), or an error as Stripe sends it.

``IDEMPOTENCY["DIALECT"]`` chooses. The dialects of SQL in ``stores/database/dialects`` share
only the word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from django.utils.translation import gettext

from ..conf import conf
from ..errors import FingerprintMismatch, IdempotencyError, KeyRefused, OperationInProgress


@dataclass(frozen=True, kw_only=True, eq=False)
class Dialect:
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


DIALECTS: Final = {
    "ietf": Dialect(error_body=_problem, media_type="application/problem+json"),
    "stripe": Dialect(
        error_body=_stripe_error,
        media_type="application/json",
        statuses={"mismatch": 400},
        retry_header="Stripe-Should-Retry",
    ),
}


def dialect() -> Dialect:
    """The dialect of the project."""
    return DIALECTS[conf.dialect]
