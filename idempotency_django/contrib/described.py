"""OpenAPI: what an operation of a protected endpoint promises, for all generators of a schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, get_args

from ..conf import conf
from ..errors import (
    FingerprintMismatch,
    IdempotencyError,
    KeyExpired,
    KeyGuessable,
    KeyMalformed,
    KeyMissing,
    OperationHeld,
    OperationInProgress,
    ResponseNotStored,
    State,
    StoreUnavailable,
)
from ..http import REPLAYED_HEADER, STATUS_HEADER, media_type, status_of
from ..policy import Policy, keys

PROBLEM_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "description": "A problem (RFC 9457): why the request was not executed.",
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string", "description": "The last part of the type."},
        "state": {
            "type": "string",
            # No enum: drf-spectacular would make it a component, beside the project's own.
            "description": (
                f"What became of the operation with this key: {', '.join(get_args(State))}."
            ),
        },
        "retryable": {
            "type": "boolean",
            "description": "Whether the same request with the same key may succeed later.",
        },
        "safe_new_key": {
            "type": "boolean",
            "description": "Whether the operation can be repeated with a new key.",
        },
    },
    "required": [
        "type",
        "title",
        "status",
        "detail",
        "code",
        "state",
        "retryable",
        "safe_new_key",
    ],
}

STRIPE_ERROR_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "description": "An error as Stripe's clients understand it: why the request was not executed.",
    "properties": {
        "error": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in ("type", "message", "code")},
        }
    },
}


def describe(
    operation: dict[str, Any],
    policy: Policy,
    method: str,
    problem: dict[str, Any],
    *,
    varies: bool = False,
) -> None:
    """Add to an OpenAPI operation what its endpoint promises; what it says already stays.

    Args:
        operation: the operation, with its ``responses`` by status, as text.
        policy: the policy of the endpoint, resolved.
        method: the HTTP method.
        problem: the schema of a problem, or a reference to it.
        varies: whether each request may have another policy, so that this one promises nothing.
    """
    if keys.reads_header(policy.key):
        _add_key(operation, policy, required=policy.requires_key(method) and not varies)
    _add_responses(operation["responses"], policy, method, problem)
    promise = {"varies": True} if varies else promise_of(policy, method)
    operation.setdefault("x-idempotency", promise)


def promise_of(policy: Policy, method: str) -> dict[str, Any]:
    """The value of ``x-idempotency`` of an operation.

    Args:
        policy: the endpoint's policy, resolved.
        method: the HTTP method.
    """
    promise: dict[str, Any] = {"required": policy.requires_key(method), "lifetime-seconds": None}
    if conf.dialect != "ietf":
        promise["dialect"] = conf.dialect
    if policy.ttl is not None:
        promise["lifetime-seconds"] = int(policy.ttl.total_seconds())
        if policy.on_expired == "refuse":
            promise["key-lifetime-seconds"] = int((policy.ttl + policy.retention).total_seconds())
    return promise


def error_schema() -> dict[str, Any]:
    """The schema of the errors of protected endpoints."""
    return PROBLEM_SCHEMA if conf.dialect == "ietf" else STRIPE_ERROR_SCHEMA


def _key_schema(policy: Policy) -> dict[str, Any]:
    if policy.key_format in ("uuid", "uuid7"):
        return {"type": "string", "format": "uuid"}
    return {"type": "string", "minLength": 1, "maxLength": keys.MAX_LENGTH}


def _add_key(operation: dict[str, Any], policy: Policy, *, required: bool) -> None:
    """Add the header with the key, unless the project documents it."""
    parameters, name = operation.setdefault("parameters", []), conf.header
    if any(
        each.get("in") == "header" and each["name"].lower() == name.lower() for each in parameters
    ):
        return
    parameters.append(
        {
            "in": "header",
            "name": name,
            "required": required,
            "schema": _key_schema(policy),
            "description": (
                "A new, unique key for each new operation, and the same key for each retry of it. "
                "A retry gets the first response."
            ),
        }
    )


def _add_responses(
    responses: dict[str, Any], policy: Policy, method: str, problem: dict[str, Any]
) -> None:
    """Add the responses and headers of the policy; what is documented stays."""
    for status, response in responses.items():
        if str(status).startswith("2"):
            for name, shown in _headers().items():
                response.setdefault("headers", {}).setdefault(name, shown)
    problems: dict[str, list[type[IdempotencyError]]] = {}
    for error in problems_of(policy, method):
        problems.setdefault(str(status_of(error)), []).append(error)
    for status, errors in sorted(problems.items()):
        titles = "; ".join(dict.fromkeys(error.title for error in errors))
        response = responses.setdefault(status, {"description": titles})
        if not response.get("description"):
            response["description"] = titles
        contents = response.setdefault("content", {})
        contents.setdefault(media_type(), {"schema": problem})
        if any(error in (OperationInProgress, StoreUnavailable) for error in errors):
            response.setdefault("headers", {}).setdefault(
                "Retry-After",
                {
                    "schema": {"type": "integer"},
                    "description": "Seconds after which the request may be sent again.",
                },
            )


def _headers() -> dict[str, Any]:
    """The headers of a response that is not refused."""
    return {
        REPLAYED_HEADER: {
            "schema": {"type": "string", "enum": ["true"]},
            "description": "The response is that of an earlier request with the same key.",
        },
        STATUS_HEADER: {
            "schema": {"type": "string"},
            "description": (
                "An item of RFC 9651: executed or replayed; ttl: for how many more seconds a retry "
                "is replayed."
            ),
        },
    }


def problems_of(policy: Policy, method: str) -> Iterator[type[IdempotencyError]]:
    """The problems that a client of an endpoint must expect.

    Args:
        policy: the endpoint's policy, resolved.
        method: the HTTP method.
    """
    if policy.requires_key(method):
        yield KeyMissing
    if keys.reads_header(policy.key):
        yield from (KeyMalformed, KeyGuessable)
    yield from (OperationInProgress, ResponseNotStored, FingerprintMismatch, StoreUnavailable)
    if policy.on_expired == "refuse":
        yield KeyExpired
    if policy.on_interrupted == "hold":
        yield OperationHeld
