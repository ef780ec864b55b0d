"""Dialects: how an API says idempotency, as its clients know it from Stripe, AWS or a standard.

A dialect says where the key is, what a refusal looks like, and what marks a response. It also
brings defaults for the fields of its policy. ``Policy(dialect="stripe")`` names one of
:data:`DIALECTS`; a :class:`Dialect` of your own is passed as it is, or by its dotted path.

The dialects of SQL in ``stores/database/dialects`` share only the word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from xml.sax.saxutils import escape

from ..errors import FingerprintMismatch, IdempotencyError, KeyRefused, OperationInProgress
from . import scopes
from .fingerprints import json_values
from .keys import MAX_LENGTH

__all__ = ["DIALECTS", "IETF", "Dialect"]

ErrorBody = Callable[[IdempotencyError, int], Mapping[str, Any] | str]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How an API says idempotency. ``dataclasses.replace(STRIPE, …)`` makes a variant.

    Attributes:
        name: its name, in the API's documentation.
        header: the request header with the key; ``None``: the one of ``IDEMPOTENCY["HEADER"]``.
        members: the members of the body that hold the key, such as ``"client.token"``, if it does
            not come in the header. Two keys that differ are refused. They take no part in the
            comparison of retries.
        sent_header: the header with the time at which the client sent the request first. A request
            has both headers or none, and is refused once the time is older than the policy's
            ``ttl``.
        sent_member: the same for a member of the body (RFC 3339), which a request may leave out.
        max_length: the longest key, in characters; at most 255.
        statuses: the status of an error, by the slug of its problem. Others are as in
            ``IDEMPOTENCY["STATUS_CODES"]``.
        error_body: called with an error and its status; returns the data of the JSON body, or a
            text. ``None``: the members of a problem (RFC 9457).
        media_type: the media type of such a body.
        replayed_header: the response header that marks a replay; empty: there is none; ``None``:
            the one of ``IDEMPOTENCY["REPLAYED_HEADER"]``.
        echoes_key: whether every response repeats the header with the key.
        result_header: the response header that is ``accepted``, or ``rejected`` for a refusal.
        retry_header: the response header of a refusal that is ``true`` if the same request can
            succeed later, else ``false``.
        quotes_key: whether a derived key is sent to the client as an RFC 9651 string.
        least_ttl: the shortest ``ttl`` that a policy with this dialect may have.
        defaults: the fields of a policy with this dialect, where nothing else sets them.
    """

    name: str
    header: str | None = None
    members: tuple[str, ...] = ()
    sent_header: str = ""
    sent_member: str = ""
    max_length: int = MAX_LENGTH
    statuses: Mapping[str, int] = field(default_factory=dict)
    error_body: ErrorBody | None = None
    media_type: str = "application/json"
    replayed_header: str | None = None
    echoes_key: bool = False
    result_header: str = ""
    retry_header: str = ""
    quotes_key: bool = False
    least_ttl: timedelta = timedelta(0)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def marks_all(self) -> bool:
        """Whether each response to a key has a header of the dialect, not only a replay."""
        return self.echoes_key or bool(self.result_header)


def code_of(error: IdempotencyError) -> str:
    """The slug of an error as a code, ``"key_missing"``, where a dialect has no code for it."""
    return error.slug.replace("-", "_")


# Bodies of errors. What a dialect's own documents do not name has the code of code_of().


def _stripe(error: IdempotencyError, status: int) -> Mapping[str, Any]:
    kind = "invalid_request_error" if status < 500 else "api_error"
    body = {"type": kind, "message": error.detail, "code": code_of(error)}
    if isinstance(error, OperationInProgress):
        body |= {"type": "idempotency_error", "code": "idempotency_key_in_use"}
    elif isinstance(error, FingerprintMismatch | KeyRefused):
        body["type"] = "idempotency_error"
    return {"error": body}


_ACP: Final = {
    "key-missing": "idempotency_key_required",
    "mismatch": "idempotency_conflict",
    "in-progress": "idempotency_in_flight",
}


def _acp(error: IdempotencyError, status: int) -> Mapping[str, Any]:
    kind = "invalid_request" if status < 500 else "processing_error"
    kind = "service_unavailable" if status == 503 else kind
    code = _ACP.get(error.slug) or code_of(error)
    return {"type": kind, "code": code, "message": error.detail}


def _odata(error: IdempotencyError, status: int) -> Mapping[str, Any]:  # noqa: ARG001
    return {"error": {"code": code_of(error), "message": error.detail}}


_EC2: Final = {
    "key-missing": "MissingParameter",
    "key-malformed": "InvalidClientToken",
    "key-guessable": "InvalidClientToken",
    "key-too-old": "InvalidClientToken",
    "mismatch": "IdempotentParameterMismatch",
    "in-progress": "PriorRequestNotComplete",  # Route 53's; AWS's clients try again
    "store-unavailable": "Unavailable",
}


def _ec2(error: IdempotencyError, status: int) -> str:
    code = _EC2.get(error.slug) or ("InternalError" if status >= 500 else "IncorrectState")
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<Response><Errors><Error>'
        f"<Code>{code}</Code><Message>{escape(error.detail)}</Message>"
        "</Error></Errors></Response>"
    )


_CANONICAL: Final = {
    400: "INVALID_ARGUMENT",
    409: "ABORTED",
    412: "FAILED_PRECONDITION",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}
"""The codes of ``google.rpc.Status`` by their HTTP status."""


def _google(error: IdempotencyError, status: int) -> Mapping[str, Any]:
    canonical = _CANONICAL.get(status, "FAILED_PRECONDITION")
    return {"error": {"code": status, "message": error.detail, "status": canonical}}


_PAYPAL: Final = {
    "key-missing": "PAYPAL_REQUEST_ID_REQUIRED",
    "key-malformed": "INVALID_PARAMETER_VALUE",
    "key-guessable": "INVALID_PARAMETER_VALUE",
    "mismatch": "PAYPAL_REQUEST_ID_PREVIOUSLY_USED",
    "in-progress": "PREVIOUS_REQUEST_IN_PROGRESS",
}
_PAYPAL_NAMES: Final = {
    400: "INVALID_REQUEST",
    409: "RESOURCE_CONFLICT",
    422: "UNPROCESSABLE_ENTITY",
    503: "SERVICE_UNAVAILABLE",
}


def _paypal(error: IdempotencyError, status: int) -> Mapping[str, Any]:
    issue = _PAYPAL.get(error.slug) or code_of(error).upper()
    name = _PAYPAL_NAMES.get(
        status, "INTERNAL_SERVER_ERROR" if status >= 500 else "INVALID_REQUEST"
    )
    details = [{"issue": issue, "description": error.detail}]
    return {"name": name, "message": error.title, "details": details}


_ADYEN: Final = {"mismatch": "704", "in-progress": "704", "store-unavailable": "703"}


def _adyen(error: IdempotencyError, status: int) -> Mapping[str, Any]:
    kind = "validation" if status < 500 else "internal"
    return {
        "status": status,
        "errorCode": _ADYEN.get(error.slug) or code_of(error),
        "message": error.detail,
        "errorType": kind,
    }


_SQUARE: Final = {
    "key-missing": "MISSING_REQUIRED_PARAMETER",
    "key-malformed": "INVALID_VALUE",
    "key-guessable": "INVALID_VALUE",
    "mismatch": "IDEMPOTENCY_KEY_REUSED",
    "store-unavailable": "SERVICE_UNAVAILABLE",
}


def _square(error: IdempotencyError, status: int) -> Mapping[str, Any]:
    code = _SQUARE.get(error.slug) or ("INTERNAL_SERVER_ERROR" if status >= 500 else "CONFLICT")
    kind = "INVALID_REQUEST_ERROR" if status < 500 else "API_ERROR"
    problem = {"category": kind, "code": code, "detail": error.detail}
    if isinstance(error, KeyRefused | FingerprintMismatch):
        problem["field"] = "idempotency_key"
    return {"errors": [problem]}


def _iceberg(error: IdempotencyError, status: int) -> Mapping[str, Any]:
    kind = _ICEBERG.get(status, "BadRequestException")
    return {"error": {"message": error.detail, "type": kind, "code": status}}


_ICEBERG: Final = {
    412: "CommitStateUnknownException",
    422: "UnprocessableEntityException",
    500: "CommitStateUnknownException",
    503: "ServiceUnavailableException",
}


# What is stored.


def stored_if_successful(request: Any, response: Any) -> bool | None:  # noqa: ARG001
    """Store successes only: work that has failed runs again."""
    return None if response.status_code < 400 else False


_OF_THE_MOMENT: Final = frozenset({401, 403, 408, 419, 425, 429})


def stored_if_terminal(request: Any, response: Any) -> bool | None:  # noqa: ARG001
    """Store every answer that a retry cannot change, also a conflict and an error of the view."""
    status = response.status_code
    return status not in _OF_THE_MOMENT if status >= 400 else None


# The dialects.

IETF: Final = Dialect(name="ietf", quotes_key=True, media_type="application/problem+json")
"""draft-ietf-httpapi-idempotency-key-header, with problems (RFC 9457): the default."""

STRIPE: Final = Dialect(
    name="stripe",
    statuses={"mismatch": 400},
    error_body=_stripe,
    replayed_header="Idempotent-Replayed",
    retry_header="Stripe-Should-Retry",
    defaults={"ttl": timedelta(hours=24), "scope": scopes.per_caller},
)
"""Stripe's API v1."""

STRIPE_V2: Final = Dialect(
    name="stripe-v2",
    statuses=STRIPE.statuses,
    error_body=_stripe,
    replayed_header="Idempotent-Replayed",
    retry_header="Stripe-Should-Retry",
    defaults={
        "ttl": timedelta(days=30),
        "scope": scopes.per_caller,
        "should_store": stored_if_successful,
    },
)
"""Stripe's API v2: a key is kept for 30 days, and failed work runs again."""

ACP: Final = Dialect(
    name="acp",
    error_body=_acp,
    replayed_header="Idempotent-Replayed",
    echoes_key=True,
    least_ttl=timedelta(hours=24),
    defaults={
        "required": frozenset({"POST"}),
        "ttl": timedelta(hours=24),
        "scope": scopes.per_path,
        "fingerprint": json_values,
    },
)
"""The Agentic Commerce Protocol."""

OASIS: Final = Dialect(
    name="oasis",
    header="Repeatability-Request-ID",
    sent_header="Repeatability-First-Sent",
    statuses={"mismatch": 400, "key-unsupported": 501},
    error_body=_odata,
    replayed_header="",
    result_header="Repeatability-Result",
    least_ttl=timedelta(minutes=5),
)
"""OASIS Repeatable Requests 1.0, as OData and Azure have it."""

EC2: Final = Dialect(
    name="ec2",
    members=("ClientToken",),
    max_length=64,
    statuses={"mismatch": 400, "in-progress": 400},
    error_body=_ec2,
    media_type="text/xml",
    replayed_header="",
)
"""Amazon EC2's API. Other AWS services differ from it, and from each other."""

AIP155: Final = Dialect(
    name="aip155",
    members=("request_id", "requestId"),
    statuses={"mismatch": 400},
    error_body=_google,
    replayed_header="",
    defaults={"key_format": "uuid"},
)
"""AIP-155: a ``request_id`` in the body, as Google's APIs have it."""

AEP155: Final = Dialect(
    name="aep155",
    members=("idempotency_key.key",),
    sent_member="idempotency_key.first_sent",
    max_length=36,
    statuses={"mismatch": 400},
    error_body=_google,
    replayed_header="",
)
"""AEP-155: an ``idempotency_key`` with its ``key`` and the time it was ``first_sent``."""

PAYPAL: Final = Dialect(
    name="paypal",
    header="PayPal-Request-Id",
    max_length=108,
    error_body=_paypal,
    replayed_header="",
    defaults={"ttl": timedelta(days=45)},
)
"""PayPal's REST APIs."""

ADYEN: Final = Dialect(
    name="adyen",
    max_length=64,
    error_body=_adyen,
    replayed_header="",
    echoes_key=True,
    retry_header="transient-error",
    defaults={"ttl": timedelta(days=7), "scope": scopes.per_caller},
)
"""Adyen's API."""

SQUARE: Final = Dialect(
    name="square",
    members=("idempotency_key",),
    max_length=192,
    statuses={"mismatch": 400},
    error_body=_square,
    replayed_header="",
)
"""Square's API."""

ICEBERG: Final = Dialect(
    name="iceberg",
    # A client takes 409 for a commit that has not happened, and does it again with another key.
    # After 400 or 409 it deletes its files: never for what may have been committed.
    statuses={
        "in-progress": 503,
        "held": 500,
        "response-not-stored": 500,
        "response-expired": 500,
        "key-too-old": 412,
    },
    error_body=_iceberg,
    replayed_header="",
    defaults={
        "key_format": "uuid7",
        "ttl": timedelta(minutes=30),
        "should_store": stored_if_terminal,
    },
)
"""The REST catalog of Apache Iceberg."""

DIALECTS: Final[Mapping[str, Dialect]] = {
    dialect.name: dialect
    for dialect in (
        IETF,
        STRIPE,
        STRIPE_V2,
        ACP,
        OASIS,
        EC2,
        AIP155,
        AEP155,
        PAYPAL,
        ADYEN,
        SQUARE,
        ICEBERG,
    )
}
"""The dialects that a policy can name."""
