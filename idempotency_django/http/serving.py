"""One HTTP request, through policy and engine and back: what all HTTP adapters have in common.

An :class:`Adapter` says how its framework runs a view, and what it makes of an error; :func:`serve`
does the rest.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from ..conf import conf
from ..engine import (
    Admit,
    Executed,
    Expired,
    Held,
    InProgress,
    Mismatched,
    Outcome,
    Replayed,
    Result,
    arun,
    refusal,
    run,
)
from ..engine.context import ExecutionContext
from ..engine.flows import Awaiting, Blocking, finish
from ..engine.outcomes import Recover
from ..engine.planning import Plan, make_plan
from ..errors import (
    IdempotencyError,
    OperationInProgress,
    ResponseNotStored,
    StoreUnavailable,
)
from ..policy import UNSAFE_METHODS, Policy, keys
from ..policy.invocation import Invocation
from ..stores.records import Record
from .invocations import invocation_of, key_header, operation_name
from .responses import (
    REPLAYED_HEADER,
    STATUS_HEADER,
    executed,
    marked,
    problem_response,
    render,
    replayed,
    response_of,
    result_of,
    result_of_error,
    retry_after,
)
from .status import accepted_payload

logger = logging.getLogger("idempotency_django")

if TYPE_CHECKING:
    from rest_framework.request import Request as _Request  # to a type checker, one of Django's
else:
    _Request = HttpRequest


class IdempotentRequest(_Request):
    """The request of a protected view, for type checkers; of Django and of REST framework.

    ::

        @idempotent(required=True, mode="leased")
        def pay(request: IdempotentRequest) -> HttpResponse:
            charge_id = request.idempotency.step("charge", charge)

    Attributes:
        idempotency: the attempt that runs. Without a key it is ``None``: where the policy does not
            require one, look first.
    """

    idempotency: ExecutionContext


class Adapter(ABC):
    """One request and its response, as an adapter's framework handles them.

    Attributes:
        http_request: Django's request.
        request: the request as the framework's own views know it.
        method: the request's method.
        run: runs the view.
        policy: the view's policy, resolved; it is known from :func:`~.serving.serve` on.
        response_class: makes the responses of this package, of the bytes, the status and the
            headers.
    """

    response_class: Callable[..., HttpResponse] = HttpResponse

    http_request: HttpRequest
    request: Any
    method: str
    run: Callable[[], Any]
    policy: Policy

    def header(self) -> str | None:
        """The key as the client sent it; ``None`` when it sent none."""
        return key_header(self.http_request)

    def invocation(self) -> Invocation:
        """The invocation that the request is, for its policy."""
        return invocation_of(self.http_request, self.policy)

    @abstractmethod
    def respond(self) -> HttpResponseBase:
        """Run the view and render its response."""

    async def arespond(self) -> HttpResponseBase:
        """The same, of an async view."""
        raise NotImplementedError

    @abstractmethod
    def recover(self, error: Exception) -> HttpResponseBase:
        """The response to the view's error, rendered or not; or raise the error again."""

    def problem(self, error: IdempotencyError) -> HttpResponseBase:
        """The response of a refusal."""
        return problem_response(error)

    def authorize(self, record: Record) -> None:
        """Raise to refuse a replay to a caller who would be refused with a new key."""
        check = self.policy.check_replay
        if check is not None:
            refuse_result(check(self.request, record), "check_replay of a policy")


def refuse_result(result: object, name: str) -> None:
    """Refuse a result of a replay check: ``False``, for example, would let everybody pass.

    Raises:
        TypeError: it returned something.
    """
    if result is not None:
        raise TypeError(
            f"The {name} returned {result!r}. It must return None, or raise PermissionDenied to "
            "refuse a replay."
        )


def log_unread_field(request: HttpRequest) -> None:
    """Log an error if a form has sent a key in a field that the policy does not read."""
    form = request.__dict__.get("_post")  # parsed already, as by the view: nothing is read here
    if form and keys.FORM_FIELD in form:
        logger.error(
            "%s %s is not protected: its form sent a key in the field %r, which the policy does "
            "not read. Give the policy key=keys.form_field().",
            request.method,
            request.path,
            keys.FORM_FIELD,
        )


def serve(adapter: Adapter, policy: Policy) -> HttpResponseBase:
    """Serve a request: run its view once per operation, replay, or refuse.

    A view that already runs for a claimed operation is called.

    Args:
        adapter: the request, as its adapter handles it.
        policy: the view's policy.
    """
    return finish(_serve(adapter, policy, _Blocking()))


async def aserve(adapter: Adapter, policy: Policy) -> HttpResponseBase:
    """:func:`serve` for an async view."""
    driver = _Awaiting()
    try:
        return await _serve(adapter, policy, driver)
    finally:
        if driver.cancelled:
            raise driver.cancelled


async def _serve(
    adapter: Adapter, policy: Policy, driver: _Blocking | _Awaiting
) -> HttpResponseBase:
    request: Any = adapter.http_request
    adapter.policy = policy.resolved()
    request.idempotency = running = getattr(request, "idempotency", None)
    takes_part = running is None and adapter.method in UNSAFE_METHODS
    plan = None
    try:
        if takes_part:
            plan = await driver.call(
                make_plan, adapter.policy, adapter, asynchronous=driver.asynchronous
            )
            if driver.cancelled:  # nothing is claimed yet
                raise driver.cancelled
        if plan is not None:
            return await _run_once(adapter, plan, driver)
        response: HttpResponseBase = await adapter.run() if driver.asynchronous else adapter.run()
    except IdempotencyError as error:
        if error.foreign:  # the view's own
            raise
        return _refusal(adapter, error, plan)
    if takes_part:
        log_unread_field(request)
    return response


async def _run_once(
    adapter: Adapter, plan: Plan, driver: _Blocking | _Awaiting
) -> HttpResponseBase:
    request: Any = adapter.http_request

    async def execute(execution: ExecutionContext) -> Result:
        request.idempotency = execution
        try:
            response = await adapter.arespond() if driver.asynchronous else adapter.respond()
            return await driver.call(result_of, adapter.http_request, adapter.policy, response)
        finally:
            request.idempotency = None  # a second run needs a claim

    asked_at = time.monotonic()
    outcome = await driver.run(plan, execute, partial(_recover, adapter), adapter.authorize)
    if isinstance(outcome, Executed):
        return _response(adapter, plan, outcome, asked_at)
    # What rebuilds or alters a replay may ask the database.
    return await driver.call(_response, adapter, plan, outcome, asked_at)


def _refusal(adapter: Adapter, error: IdempotencyError, plan: Plan | None) -> HttpResponseBase:
    """The response of a refusal; a fault of the server is logged."""
    if error.status >= 500:
        name = plan.operation.name if plan else operation_name(adapter.http_request)
        logger.error("%s failed with an idempotency error.", name, exc_info=error)
    if isinstance(error, OperationInProgress | StoreUnavailable) and error.retryable:
        error.retry_after = retry_after()
    return marked(adapter.problem(error), error)


Execute = Callable[[ExecutionContext], Coroutine[Any, Any, Result]]


class _Blocking(Blocking):
    """Drives the flow of a sync view, in its thread."""

    asynchronous = False

    async def run(self, plan: Plan, execute: Execute, recover: Recover, admit: Admit) -> Outcome:
        return run(plan.store, plan.operation, lambda c: finish(execute(c)), recover, admit=admit)


class _Awaiting(Awaiting):
    """Drives the flow of an async view. What may ask the database is called in a thread."""

    asynchronous = True

    async def run(self, plan: Plan, execute: Execute, recover: Recover, admit: Admit) -> Outcome:
        return await arun(plan.store, plan.operation, execute, recover, admit=admit)


def _recover(adapter: Adapter, error: Exception) -> Result:
    """The result of what the view raised, or its error again."""
    if isinstance(error, IdempotencyError) and not error.foreign:
        raise error  # ours, not the view's
    response = adapter.recover(error)
    return result_of_error(adapter.http_request, adapter.policy, response, error)


def _response(adapter: Adapter, plan: Plan, outcome: Outcome, asked_at: float) -> HttpResponseBase:
    """The response that the client gets; headers say what became of the request, and its key.

    Args:
        adapter: the request.
        plan: what was run.
        outcome: how that ended.
        asked_at: ``time.monotonic()`` before the claim.
    """
    response: HttpResponseBase
    policy = adapter.policy
    match outcome:
        case Executed(response, payload):
            can_replay = payload is not None and (payload.body is not None or policy.rebuild)
            elapsed = time.monotonic() - asked_at
            status = executed(plan.operation, elapsed) if can_replay else "executed; stored=?0"
        case Replayed(record):
            response = _replay(adapter, record)
            status = replayed(record)
        case InProgress(busy=False) if policy.on_conflict == "accepted":
            response = response_of(accepted_payload(plan), adapter.response_class)
            status = OperationInProgress.token
        case InProgress() | Held() | Mismatched() | Expired():
            raise refusal(outcome)
        case _:
            assert_never(outcome)
    response[STATUS_HEADER] = status
    if plan.names_key:
        response[conf.header] = keys.quoted(plan.operation.key)
    return response


def _replay(adapter: Adapter, record: Record) -> HttpResponseBase:
    """The response of a record, as the policy's ``on_replay`` returns it."""
    response: HttpResponseBase
    payload, policy = record.payload, adapter.policy
    if payload is not None and payload.body is not None:
        response = response_of(payload, adapter.response_class)
    elif policy.rebuild is None:
        raise ResponseNotStored
    else:
        rebuilt = policy.rebuild(record, adapter.http_request)
        response = render(rebuilt, adapter.http_request, later=True)
    if policy.on_replay is not None:
        changed = policy.on_replay(adapter.http_request, response)
        response = render(changed, adapter.http_request, later=True)
    response[REPLAYED_HEADER] = "true"
    return response
