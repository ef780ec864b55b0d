"""OpenAPI: the guarantees of the endpoints, in the schema that drf-spectacular generates.

The app loads this module if ``"drf_spectacular"`` is in ``INSTALLED_APPS``; nothing is configured.
Each protected operation gets the header of the key, the problems that a client must expect, the
header that marks a replay, and ``x-idempotency``. Everything is read from the inventory, so the
schema says what is enforced.
"""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiViewExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import ResolvedComponent

from ..checks import endpoint_of
from ..conf import conf
from .described import describe, error_schema


def _component() -> ResolvedComponent:
    """The schema of the errors."""
    name = "IdempotencyProblem" if conf.dialect == "ietf" else "StripeIdempotencyError"
    return ResolvedComponent(  # type: ignore[no-untyped-call]  # it has few types
        name=name, type=ResolvedComponent.SCHEMA, object=name, schema=error_schema()
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
        if endpoint is None or (policy := endpoint.enforced) is None:
            return operation
        component = _component()
        self.registry.register_on_missing(component)  # type: ignore[attr-defined]
        describe(operation, policy, self.method, component.ref, varies=endpoint.varies)
        return operation


def _documented(schema: type, callback: Any) -> Any:
    """A schema of the class, whose operations say what is promised."""
    attributes = {"callback": staticmethod(callback)}
    return type(schema.__name__, (_Documented, schema), attributes)()
