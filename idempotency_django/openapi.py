"""OpenAPI: the guarantees of the endpoints, in the schema that drf-spectacular generates.

The app loads this module if ``"drf_spectacular"`` is in ``INSTALLED_APPS``; nothing is configured.
Each protected operation gets the header of the key, the problems that a client must expect, the
header that marks a replay, and ``x-idempotency``. Everything is read from the inventory, so the
schema says what is enforced.
"""

from __future__ import annotations

from typing import Any, Final, get_args

from drf_spectacular.extensions import OpenApiViewExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import ResolvedComponent

from .checks.inventory import endpoint_of
from .conf import conf
from .discovery import problems_of
from .errors import IdempotencyError, OperationInProgress, State, StoreUnavailable
from .http.messages import status_of
from .policy import Policy, keys

PROBLEM: Final = "application/problem+json"
_LONGEST_KEY: Final = 255

_COMPONENT: Final = ResolvedComponent(  # type: ignore[no-untyped-call]  # it has few types
    name="IdempotencyProblem",
    type=ResolvedComponent.SCHEMA,
    object="IdempotencyProblem",
    schema={
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
    },
)


class IdempotentViews(OpenApiViewExtension):  # type: ignore[no-untyped-call]
    """Adds to each view what its endpoints promise, after every other extension of the view."""

    target_class = "rest_framework.views.APIView"
    match_subclasses = True
    priority = 1000

    def view_replacement(self) -> type:
        callback = self.target_callback
        original = callback.cls
        for extension in sorted(self._registry, key=lambda each: each.priority, reverse=True):
            if extension is not type(self) and extension._matches(original):
                original = extension(callback).view_replacement()
                break
        schema = type(original.schema)
        if not issubclass(schema, AutoSchema):
            replaced: type = original  # drf-spectacular says what is wrong with it
            return replaced
        attributes = {"__module__": original.__module__, "schema": _documented(schema, callback)}
        return type(original.__name__, (original,), attributes)


class _Documented:
    """A schema of drf-spectacular whose operations say what is promised.

    Attributes:
        callback: the view, as the URLconf has it.
    """

    callback: Any
    method: str

    def __set__(self, view: Any, schema: Any) -> None:
        # @extend_schema on a handler brings a schema, or the class of one: that says it, too.
        schema_class = schema if isinstance(schema, type) else schema.__class__
        super().__set__(view, _documented(schema_class, self.callback))  # type: ignore[misc]

    def get_operation(self, path: str, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        operation: dict[str, Any] | None
        operation = super().get_operation(path, *args, **kwargs)  # type: ignore[misc]
        if operation is None:
            return None
        endpoint = endpoint_of(self.callback, self.method, path)
        if endpoint is None or endpoint.policy is None or endpoint.problem:
            return operation
        policy = endpoint.policy.resolved()
        if policy.key is None or keys.reads_header(policy.key):
            _add_parameter(operation, policy, self.method)
        self.registry.register_on_missing(_COMPONENT)  # type: ignore[attr-defined]
        _add_responses(operation["responses"], policy, self.method)
        lifetime = int(policy.ttl.total_seconds()) if policy.ttl else None
        operation.setdefault(
            "x-idempotency",
            {
                "required": policy.requires_key(self.method),
                "lifetime-seconds": lifetime,
            },
        )
        return operation


def _documented(schema: type, callback: Any) -> Any:
    """A schema of the class, whose operations say what is promised."""
    attributes = {"callback": staticmethod(callback)}
    return type(schema.__name__, (_Documented, schema), attributes)()


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


def _add_responses(responses: dict[str, Any], policy: Policy, method: str) -> None:
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
        response.setdefault("content", {}).setdefault(PROBLEM, {"schema": _COMPONENT.ref})
        if any(error in (OperationInProgress, StoreUnavailable) for error in errors):
            response.setdefault("headers", {}).setdefault(
                "Retry-After",
                {
                    "schema": {"type": "integer"},
                    "description": "Seconds after which the request may be sent again.",
                },
            )
