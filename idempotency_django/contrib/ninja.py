"""django-ninja: ``@idempotent`` below ``@api.post(…)`` protects the operation.

::

    @api.post("/orders", response={201: OrderOut})
    @idempotent(required=True)
    def create_order(request, order: OrderIn): ...

Authentication, throttles and the validation of arguments run for every request, before a replay.
The function and the making of its response run once. ninja itself is never imported here: it calls
what :func:`offer` leaves on the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import reduce, wraps
from http.client import responses as reasons
from types import FunctionType, MethodType
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from ..conf import conf
from ..decorators import on_protected
from ..errors import IdempotencyError
from ..http import (
    ADAPTER,
    ViewAdapter,
    invocation_of,
    principal_of,
)
from ..policy import UNSAFE_METHODS, Invocation, Policy
from .described import describe, error_schema

_CALLBACKS: Final = "_ninja_contribute_to_operation"
"""The attribute of a function with what ninja calls for each operation that is made of it."""


class NinjaAdapter(ViewAdapter):
    """One request to an operation, which ninja has authenticated, throttled and validated."""

    operation: Any

    def header(self) -> str | None:
        # ninja's test client spells the names of headers in META in its own way.
        sent = super().header()
        if sent is not None:
            return sent
        return self.http_request.headers.get(conf.header)

    def invocation(self) -> Invocation:
        request, policy = self.http_request, self.policy
        body = None if hasattr(request, "_stream") else lambda: request.body  # of ninja's tests
        auth, person = getattr(request, "auth", None), getattr(request, "user", None)
        if auth is None:
            return invocation_of(request, policy, body=body)
        # What authenticated the operation comes first: the session may be another caller's.
        user = auth if getattr(auth, "is_authenticated", False) else None
        beside = principal_of(person) if user is None and not policy.principal else ""
        # A plain function may read what nothing here knows of.
        callbacks = self.operation.auth_callbacks
        reads = all(getattr(each, "header", None) == "Authorization" for each in callbacks)
        authorization = None if reads else ""
        invocation = invocation_of(
            request, policy, user=user, auth=auth, body=body, authorization=authorization
        )
        if not beside:
            return invocation
        # Persons may log in beside the key of an application.
        return invocation.changed(authorization=f"{invocation.authorization} with {beside}")

    def respond(self) -> HttpResponseBase:
        return self._made(self.run())

    async def arespond(self) -> HttpResponseBase:
        return self._made(await self.run())

    def _made(self, result: Any) -> HttpResponseBase:
        """The response, made within the transaction, because it is stored."""
        operation, request = self.operation, self.http_request
        given = self.run.keywords.get(operation.signature.response_arg)  # type: ignore[attr-defined]  # a partial
        response = operation.api.create_temporal_response(request) if given is None else given
        made: HttpResponseBase = operation._result_to_response(request, result, response)
        return made

    def recover(self, error: Exception) -> HttpResponseBase:
        if not self.policy.should_store:
            raise error
        response: HttpResponseBase = self.operation.api.on_exception(self.http_request, error)
        return response

    def problem(self, error: IdempotencyError) -> HttpResponseBase:
        known = {*self.operation.api._exception_handlers, Exception}
        if next(kind for kind in type(error).__mro__ if kind in known) is Exception:
            return super().problem(error)
        response: HttpResponseBase = self.operation.api.on_exception(self.http_request, error)
        return response


def offer(function: Any, policy: Policy) -> None:
    """Let a protected function become an operation of django-ninja."""
    if isinstance(function, FunctionType):
        # A new list: functools.wraps() has copied a reference to that of the unprotected function.
        callbacks = [*getattr(function, _CALLBACKS, ()), lambda made: _prepare(made, policy)]
        setattr(function, _CALLBACKS, callbacks)
        _resolve_annotations(function)


on_protected.append(offer)


def _resolve_annotations(function: Any) -> None:
    """Let ninja know the types of arguments that are annotated with strings.

    It looks for them in the module of the function that it gets, which is a wrapper here.
    """
    bare = inspect.unwrap(function)
    if not isinstance(bare, FunctionType):
        return
    named = FunctionType((lambda: None).__code__, bare.__globals__)
    named.__annotations__ = {k: each for k, each in bare.__annotations__.items() if k != "return"}
    if not any(isinstance(each, str) for each in named.__annotations__.values()):
        return
    with suppress(Exception):  # a name that is not known yet, as in a view that is not ninja's
        types = inspect.get_annotations(named, eval_str=True)
        signature = inspect.signature(bare)
        function.__signature__ = signature.replace(
            parameters=[
                each.replace(annotation=types.get(each.name, each.annotation))
                for each in signature.parameters.values()
            ]
        )


def _prepare(operation: Any, policy: Policy) -> None:
    """Called by ninja with a new operation."""
    if operation.stream_format is not None:
        raise ImproperlyConfigured(
            f"The operation {operation.path} streams its response, so @idempotent cannot store it, "
            "and its work is done after the function has returned. Remove @idempotent, and "
            "protect the work with idempotent_call()."
        )
    # ninja applies these to each copy of the operation, for each API that its router is in.
    # Ours is the first, which gets the method of the copy.
    operation._run_decorators = [_noting, *getattr(operation, "_run_decorators", ())]
    bare = MethodType(type(operation).run, operation)
    operation.run = reduce(lambda run, decorate: decorate(run), operation._run_decorators, bare)
    methods = UNSAFE_METHODS.intersection(operation.methods)
    resolved = policy.resolved()
    if methods:
        operation.openapi_extra = _documented(operation, resolved, min(methods))


def _noting(run: Any) -> Callable[..., Any]:
    """Note on each request which operation it is for, so that its function finds it."""
    operation = run.__self__

    class OperationAdapter(NinjaAdapter):
        pass

    OperationAdapter.operation = operation

    @wraps(run)
    def noted(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        setattr(request, ADAPTER, OperationAdapter)
        return run(request, *args, **kwargs)

    return noted


def _documented(operation: Any, policy: Policy, method: str) -> dict[str, Any]:
    """The ``openapi_extra`` of an operation, with the project's own."""
    extra: dict[str, Any] = deepcopy(operation.openapi_extra or {})
    known = {str(status) for status in operation.response_models if status is not Ellipsis}
    own = {str(status): each for status, each in extra.pop("responses", {}).items()}
    responses = {
        status: {"description": reasons.get(int(status), "Unknown Status Code")}
        | own.get(status, {})
        for status in known | own.keys()
    }
    extra = {"parameters": [], **extra, "responses": responses}
    describe(extra, policy, method, error_schema())
    arguments = {each.alias.lower().replace("_", "-") for each in operation.signature.params}
    extra["parameters"] = [  # what is an argument is as the project documents it
        each for each in extra["parameters"] if each["name"].lower() not in arguments
    ]
    return {**extra, "responses": {int(status): each for status, each in responses.items()}}
