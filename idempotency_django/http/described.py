"""OpenAPI: what an operation of a protected endpoint promises, for all generators of a schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args

from ..conf import conf
from ..errors import (
    AnswerNotAcceptable,
    FingerprintMismatch,
    IdempotencyError,
    KeyGuessable,
    KeyMalformed,
    KeyMissing,
    KeyTooOld,
    OperationHeld,
    OperationInProgress,
    ResponseExpired,
    ResponseNotStored,
    State,
    StoreUnavailable,
)
from ..policy import Policy, dialect_of, keys
from ..policy.dialects import IETF, Dialect
from ..policy.identity import carries_time, header_of
from .messages import error_body, replayed_header, status_of

_JSON: Final = "application/json"

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
    dialect, required = dialect_of(policy), policy.requires_key(method) and not varies
    if keys.reads_header(policy.key):
        if dialect.members:
            _add_member(operation, policy, required=required)
        else:
            _add_parameters(operation, policy, required=required)
    _add_responses(operation["responses"], policy, method, problem)
    promise = {"varies": True} if varies else promise_of(policy, method)
    operation.setdefault("x-idempotency", promise)


def promise_of(policy: Policy, method: str) -> dict[str, Any]:
    """The value of ``x-idempotency`` of an operation.

    Args:
        policy: the endpoint's policy, resolved.
        method: the HTTP method.
    """
    dialect = dialect_of(policy)
    promise: dict[str, Any] = {"required": policy.requires_key(method), "lifetime-seconds": None}
    if dialect != IETF:
        promise["dialect"] = dialect.name
    if policy.ttl is not None:
        promise["lifetime-seconds"] = int(policy.ttl.total_seconds())
        if policy.reserved:
            promise["key-lifetime-seconds"] = int((policy.ttl + policy.reserved).total_seconds())
    return promise


def error_schema(dialect: Dialect) -> dict[str, Any]:
    """The schema of a dialect's errors."""
    if dialect.error_body is None:
        return PROBLEM_SCHEMA
    return _shape_of(error_body(KeyMalformed(), dialect))


def _key_schema(policy: Policy) -> dict[str, Any]:
    if policy.key_format in ("uuid", "uuid7"):
        return {"type": "string", "format": "uuid"}
    return {"type": "string", "minLength": 1, "maxLength": dialect_of(policy).max_length}


def _add_parameters(operation: dict[str, Any], policy: Policy, *, required: bool) -> None:
    dialect = dialect_of(policy)
    _add_parameter(operation, header_of(dialect), _key_schema(policy), _KEY, required)
    if dialect.sent_header:
        schema = {"type": "string"}
        _add_parameter(operation, dialect.sent_header, schema, _FIRST_SENT, required)


def _add_parameter(
    operation: dict[str, Any], name: str, schema: dict[str, Any], description: str, required: bool
) -> None:
    parameters = operation.setdefault("parameters", [])
    if any(
        each.get("in") == "header" and each["name"].lower() == name.lower() for each in parameters
    ):
        return  # as the project documents it
    parameters.append(
        {
            "in": "header",
            "name": name,
            "required": required,
            "schema": schema,
            "description": description,
        }
    )


def _add_member(operation: dict[str, Any], policy: Policy, *, required: bool) -> None:
    """Add the member with the key to each kind of body."""
    schema = {**_key_schema(policy), "description": _KEY}
    for name in reversed(dialect_of(policy).members[0].split(".")):
        schema = {"type": "object", "properties": {name: schema}}
        if required:
            schema["required"] = [name]
    contents = operation.setdefault("requestBody", {}).setdefault("content", {})
    for content in contents.values() if contents else [contents.setdefault(_JSON, {})]:
        content["schema"] = {"allOf": [each for each in (content.get("schema"), schema) if each]}
    if required:
        operation["requestBody"]["required"] = True


_KEY: Final = (
    "A new, unique key for each new operation, and the same key for each retry of it. "
    "A retry gets the first response."
)
_FIRST_SENT: Final = "When the request was first sent, as an HTTP date: the same in each retry."


def _shape_of(value: Any) -> dict[str, Any]:
    """The schema of data like these."""
    if isinstance(value, Mapping):
        return {
            "type": "object",
            "properties": {name: _shape_of(each) for name, each in value.items()},
        }
    if isinstance(value, list):
        return {"type": "array", "items": _shape_of(value[0])}
    return {"type": "integer" if isinstance(value, int) else "string"}


def _add_responses(
    responses: dict[str, Any], policy: Policy, method: str, problem: dict[str, Any]
) -> None:
    """Add the responses and headers of the policy; what is documented stays."""
    dialect = dialect_of(policy)
    for status, response in responses.items():
        if str(status).startswith("2"):
            for name, shown in _headers(dialect).items():
                response.setdefault("headers", {}).setdefault(name, shown)
    problems: dict[str, list[type[IdempotencyError]]] = {}
    for error in problems_of(policy, method):
        problems.setdefault(str(status_of(error, dialect)), []).append(error)
    for status, errors in sorted(problems.items()):
        titles = "; ".join(error.title for error in errors)
        response = responses.setdefault(status, {"description": titles})
        if not response.get("description"):
            response["description"] = titles
        contents = response.setdefault("content", {})
        contents.setdefault(dialect.media_type, {"schema": problem})
        if any(error in (OperationInProgress, StoreUnavailable) for error in errors):
            response.setdefault("headers", {}).setdefault(
                "Retry-After",
                {
                    "schema": {"type": "integer"},
                    "description": "Seconds after which the request may be sent again.",
                },
            )


def _headers(dialect: Dialect) -> dict[str, Any]:
    """The headers of a response that is not refused."""
    shown: dict[str, Any] = {}
    if name := replayed_header(dialect):
        shown[name] = {
            "schema": {"type": "string", "enum": ["true"]},
            "description": "The response is that of an earlier request with the same key.",
        }
    if conf.status_header:
        shown[conf.status_header] = {
            "schema": {"type": "string"},
            "description": (
                "An item of RFC 9651: executed or replayed; ttl: for how many more seconds a retry "
                "is replayed."
            ),
        }
    if dialect.result_header:
        shown[dialect.result_header] = {
            "schema": {"type": "string", "enum": ["accepted"]},
            "description": "The request is not executed again if it is repeated.",
        }
    if dialect.echoes_key:
        shown[header_of(dialect)] = {
            "schema": {"type": "string"},
            "description": "The key of the request.",
        }
    return shown


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
        if carries_time(policy):
            yield KeyTooOld
    yield from (OperationInProgress, ResponseNotStored, FingerprintMismatch, StoreUnavailable)
    yield AnswerNotAcceptable
    if policy.reserved:
        yield ResponseExpired
    if policy.on_interrupted == "hold":
        yield OperationHeld
