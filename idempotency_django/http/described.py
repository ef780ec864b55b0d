"""OpenAPI: what an operation of a protected endpoint promises, for all generators of a schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, get_args

from ..conf import conf
from ..errors import (
    AnswerNotAcceptable,
    FingerprintMismatch,
    IdempotencyError,
    KeyGuessable,
    KeyMalformed,
    KeyMissing,
    OperationHeld,
    OperationInProgress,
    ResponseExpired,
    ResponseNotStored,
    State,
    StoreUnavailable,
)
from ..policy import Policy, keys
from .messages import status_of

PROBLEM: Final = "application/problem+json"
_LONGEST_KEY: Final = 255

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


def describe(
    operation: dict[str, Any], policy: Policy, method: str, problem: dict[str, Any]
) -> None:
    """Add to an OpenAPI operation what its endpoint promises; what it says already stays.

    Args:
        operation: the operation, with its ``responses`` by status, as text.
        policy: the policy of the endpoint, resolved.
        method: the HTTP method.
        problem: the schema of a problem, or a reference to it.
    """
    if policy.key is None or keys.reads_header(policy.key):
        _add_parameter(operation, policy, method)
    _add_responses(operation["responses"], policy, method, problem)
    operation.setdefault("x-idempotency", promise_of(policy, method))


def promise_of(policy: Policy, method: str) -> dict[str, Any]:
    """What ``x-idempotency`` says of an operation.

    Args:
        policy: the endpoint's policy, resolved.
        method: the HTTP method.
    """
    promise: dict[str, Any] = {"required": policy.requires_key(method), "lifetime-seconds": None}
    if policy.ttl is not None:
        promise["lifetime-seconds"] = int(policy.ttl.total_seconds())
        if policy.reserved:
            promise["key-lifetime-seconds"] = int((policy.ttl + policy.reserved).total_seconds())
    return promise


def _add_parameter(operation: dict[str, Any], policy: Policy, method: str) -> None:
    parameters = operation.setdefault("parameters", [])
    named = {each["name"].lower() for each in parameters if each.get("in") == "header"}
    if conf.header.lower() in named:
        return  # as the project documents it
    schema: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": _LONGEST_KEY}
    if policy.key_format == "uuid":
        schema = {"type": "string", "format": "uuid"}
    parameters.append(
        {
            "in": "header",
            "name": conf.header,
            "required": policy.requires_key(method),
            "schema": schema,
            "description": (
                "A new, unique key for each new operation, and the same key for each retry of it. "
                "A retry gets the first response."
            ),
        }
    )


def _add_responses(
    responses: dict[str, Any], policy: Policy, method: str, problem: dict[str, Any]
) -> None:
    for status, response in responses.items():
        if str(status).startswith("2"):
            response.setdefault("headers", {}).setdefault(
                conf.replayed_header,
                {
                    "schema": {"type": "string", "enum": ["true"]},
                    "description": "The response is that of an earlier request with the same key.",
                },
            )
    problems: dict[str, list[type[IdempotencyError]]] = {}
    for error in problems_of(policy, method):
        problems.setdefault(str(status_of(error)), []).append(error)
    for status, errors in sorted(problems.items()):
        titles = "; ".join(error.title for error in errors)
        response = responses.setdefault(status, {"description": titles})
        if not response.get("description"):
            response["description"] = titles
        response.setdefault("content", {}).setdefault(PROBLEM, {"schema": problem})
        if any(error in (OperationInProgress, StoreUnavailable) for error in errors):
            response.setdefault("headers", {}).setdefault(
                "Retry-After",
                {
                    "schema": {"type": "integer"},
                    "description": "Seconds after which the request may be sent again.",
                },
            )


def problems_of(policy: Policy, method: str) -> Iterator[type[IdempotencyError]]:
    """The problems that a client of an endpoint must expect.

    Args:
        policy: the endpoint's policy, resolved.
        method: the HTTP method.
    """
    if policy.requires_key(method):
        yield KeyMissing
    if policy.key is None or keys.reads_header(policy.key):
        yield from (KeyMalformed, KeyGuessable)
    yield from (OperationInProgress, ResponseNotStored, FingerprintMismatch, StoreUnavailable)
    yield AnswerNotAcceptable
    if policy.reserved:
        yield ResponseExpired
    if policy.on_interrupted == "hold":
        yield OperationHeld
