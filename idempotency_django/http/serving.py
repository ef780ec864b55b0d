"""One HTTP request, through policy and engine and back: what all HTTP adapters have in common.

An adapter adds an :class:`Adapter`: how its framework runs a view, and what it makes of an error.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, assert_never

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from ..conf import conf
from ..engine import (
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
from ..engine.planning import Plan, make_plan
from ..errors import (
    IdempotencyError,
    OperationInProgress,
    StoreUnavailable,
)
from ..policy import UNSAFE_METHODS, Policy, identity, keys
from ..stores.records import Operation, Record
from .marking import IN_PROGRESS, NOT_STORED, executed, mark, replayed
from .messages import (
    PLANNED,
    Adapter,
    authorization_of,
    has_body,
    mark_replay,
    principal_of,
    response_of,
    result_of,
    result_of_error,
)
from .status import UNKNOWN, accepted_response

logger = logging.getLogger("idempotency_django")


def init_idempotency(request: HttpRequest) -> bool:
    """Give the request its ``idempotency``, ``None`` so far; ``False``: it has one already."""
    execution = getattr(request, "idempotency", None)
    request.idempotency = execution  # type: ignore[attr-defined]  # ours, for the view
    return execution is None


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
        policy: the view's policy, resolved.

    Raises:
        IdempotencyError: the request is refused; nothing was executed, or all was rolled back.
    """
    request, adapter.policy = adapter.http_request, policy
    takes_part = init_idempotency(request) and adapter.method in UNSAFE_METHODS
    plan = make_plan(policy, adapter) if takes_part else None
    if plan is None:
        response = adapter.respond()
        if takes_part:
            log_unread_field(request)
        return response

    setattr(request, PLANNED, True)
    conf.for_responses  # noqa: B018  # a wrong setting is refused before the view runs
    asked_at = time.monotonic()
    try:
        outcome = run(
            plan.store,
            plan.operation,
            partial(_execute, adapter, policy),
            partial(_recover, adapter, policy),
            admit=partial(adapter.authorize, policy=policy),
        )
        return _response(adapter, policy, plan, outcome, asked_at)
    except IdempotencyError as error:
        _explain(error, plan.operation)
        raise


@contextmanager
def _running(adapter: Adapter, execution: ExecutionContext) -> Iterator[None]:
    """The view runs in the block, as the request's attempt."""
    request: Any = adapter.http_request
    request.idempotency = execution
    try:
        yield
    finally:
        request.idempotency = None  # a second run needs a claim of its own


def _execute(adapter: Adapter, policy: Policy, execution: ExecutionContext) -> Result:
    with _running(adapter, execution):
        return result_of(adapter, adapter.respond(), policy)


async def aserve(adapter: Adapter, policy: Policy) -> HttpResponseBase:
    """:func:`serve` for an async view."""
    adapter.policy = policy
    if not (init_idempotency(adapter.http_request) and adapter.method in UNSAFE_METHODS):
        return await adapter.arespond()
    # In a thread: the caller is looked up in the database, and a policy's callables may use it too.
    plan = await sync_to_async(make_plan)(policy, adapter, asynchronous=True)
    if plan is None:
        response = await adapter.arespond()
        log_unread_field(adapter.http_request)
        return response

    setattr(adapter.http_request, PLANNED, True)
    conf.for_responses  # noqa: B018
    asked_at = time.monotonic()

    async def execute(execution: ExecutionContext) -> Result:
        with _running(adapter, execution):
            response = await adapter.arespond()
            if policy.should_store is None and not hasattr(response, "context_data"):
                return result_of(adapter, response, policy)
            # It may ask the database.
            return await sync_to_async(result_of)(adapter, response, policy)

    try:
        recover = partial(_recover, adapter, policy)
        admit = partial(adapter.authorize, policy=policy)
        outcome = await arun(plan.store, plan.operation, execute, recover, admit=admit)
        is_complete = isinstance(outcome, Replayed) and has_body(outcome.record)
        if is_complete and policy.on_replay is None:
            return _response(adapter, policy, plan, outcome, asked_at)
        # What rebuilds or alters a response may ask the database.
        return await sync_to_async(_response)(adapter, policy, plan, outcome, asked_at)
    except IdempotencyError as error:
        _explain(error, plan.operation)
        raise


def _recover(adapter: Adapter, policy: Policy, error: Exception) -> Result:
    """The result of what the view raised, or its error again."""
    if isinstance(error, IdempotencyError) and not error.foreign:
        raise error  # ours, not the view's
    response = adapter.recover(error, policy)
    return result_of_error(adapter, response, error, policy)


def _explain(error: IdempotencyError, operation: Operation) -> None:
    """Log a fault of the server, and tell the client when to retry."""
    if error.foreign:
        return
    if error.status >= 500:
        logger.error("%s failed with an idempotency error.", operation.name, exc_info=error)
    if isinstance(error, OperationInProgress | StoreUnavailable):
        error.retry_after = _retry_after()


def _response(
    adapter: Adapter,
    policy: Policy,
    plan: Plan,
    outcome: Outcome,
    asked_at: float,
) -> HttpResponseBase:
    """The response that the client gets; headers say what became of the request, and its key.

    Args:
        adapter: the request.
        policy: the policy, resolved.
        plan: what was run.
        outcome: how that ended.
        asked_at: a value of ``time.monotonic()`` from before that.
    """
    response: HttpResponseBase
    operation = plan.operation
    match outcome:
        case Executed(response, payload):
            lost = payload is not None and payload.body is None and not adapter.can_rebuild(policy)
            elapsed = time.monotonic() - asked_at
            mark(response, NOT_STORED if lost else executed(outcome, operation, elapsed))
        case Replayed(record):
            response = _altered(adapter, policy, _replay(adapter, policy, record))
            mark(response, replayed(record))
        case InProgress(busy=False) if policy.on_conflict == "accepted":
            owners = _owners(adapter, policy, operation)
            accepted = accepted_response(plan.store, operation, owners, _retry_after())
            response = adapter.native(accepted)
            mark(response, IN_PROGRESS)
        case InProgress() | Held() | Mismatched() | Expired():
            raise refusal(outcome)
        case _:
            assert_never(outcome)
    if plan.derived:
        response[conf.header] = keys.quoted(operation.key)
    return response


def _owners(adapter: Adapter, policy: Policy, operation: Operation) -> list[str]:
    """Who may ask for the status: a caller whom its view knows, else who has the same token."""
    request, caller = adapter.http_request, operation.principal
    user = getattr(request, "user", None)
    # Without a primary key, it is the policy that knows the user.
    if caller and getattr(user, "pk", None) is not None and caller == principal_of(user):
        return [caller]
    owners = identity.owners_of(authorization_of(request))[:1]
    if caller and not policy.principal:  # another status view may know it
        owners.append(caller)
    return owners or [UNKNOWN if caller else ""]


def _retry_after() -> int:
    return max(1, math.ceil(conf.retry_after.total_seconds()))


def _altered(adapter: Adapter, policy: Policy, response: HttpResponseBase) -> HttpResponseBase:
    if policy.on_replay is None:
        return response
    altered = policy.on_replay(adapter.http_request, response)
    if not isinstance(altered, HttpResponseBase):
        raise ImproperlyConfigured(
            f"The on_replay of an idempotency policy returned a {type(altered).__name__}; it must "
            "return the response."
        )
    mark_replay(altered)  # it may be another response
    return altered


def _replay(adapter: Adapter, policy: Policy, record: Record) -> HttpResponseBase:
    payload = record.payload
    if payload is not None and payload.body is not None:
        return adapter.native(response_of(payload))
    response = adapter.rebuild(record, policy)
    mark_replay(response)
    return response
