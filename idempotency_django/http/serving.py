"""One HTTP request, through policy and engine and back: what all HTTP adapters have in common.

An adapter adds an :class:`Adapter`: how its framework runs a view, and how it answers an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import assert_never, cast

from asgiref.sync import sync_to_async
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from .. import engine
from ..conf import conf
from ..engine import (
    Atomic,
    Executed,
    Held,
    InProgress,
    Mismatched,
    Outcome,
    Replayed,
    Result,
    refusal,
)
from ..engine.context import ExecutionContext
from ..errors import (
    IdempotencyError,
    OperationInProgress,
    StoreUnavailable,
)
from ..planning import Plan
from ..planning import plan as planned
from ..policy import Policy, keys
from ..records import Operation, Record
from ..stores import Store
from ..stores.atomic_blocks import opened_by_django, refuse_others
from .adapter import Adapter, has_body
from .atomic_requests import RequestTransactions
from .results import result_of, result_of_error
from .sessions import Before, save_session
from .status import accepted

logger = logging.getLogger("idempotency_django")


def unclaimed(request: HttpRequest) -> bool:
    """Give the request its ``idempotency``, ``None`` so far; ``False``: it has one already."""
    execution = getattr(request, "idempotency", None)
    request.idempotency = execution  # type: ignore[attr-defined]  # ours, for the view
    return execution is None


def serve(
    adapter: Adapter, policy: Policy, transactions: RequestTransactions | None = None
) -> HttpResponseBase:
    """Answer a request: run its view once per operation, replay, or refuse.

    A view that already runs for a claimed operation is just called.

    Args:
        adapter: the request, as its adapter handles it.
        policy: the view's policy, resolved.
        transactions: what the adapter opened around the request.

    Raises:
        IdempotencyError: the request is refused; nothing was executed, or all was rolled back.
    """
    plan = planned(policy, adapter) if _takes_part(adapter, policy) else None
    if plan is None:
        return adapter.respond()

    request, before = adapter.http_request, Before(adapter.http_request)

    def execute(execution: ExecutionContext) -> Result:
        with _running(request, execution), adapter.tokens.noticed():
            if plan.operation.lease is not None:
                return result_of(adapter, adapter.respond(), policy)
            return _with_session(adapter, policy, plan.store, before)

    with _explained(plan.operation, policy):
        atomic = _atomic(plan, transactions)
        recover, admit = _recover(adapter, policy), partial(_admit, adapter, policy)
        outcome = engine.run(
            plan.store,
            plan.operation,
            execute,
            recover,
            atomic=atomic,
            undo=before.restore,
            admit=admit,
        )
        return _marked(plan, _response(adapter, policy, plan, outcome))


async def aserve(adapter: Adapter, policy: Policy) -> HttpResponseBase:
    """:func:`serve` for an async view."""
    if not _takes_part(adapter, policy):
        return await adapter.arespond()
    # In a thread: the caller is looked up in the database, and a policy's callables may use it too.
    plan = await sync_to_async(planned)(policy, adapter, asynchronous=True)
    if plan is None:
        return await adapter.arespond()

    async def execute(execution: ExecutionContext) -> Result:
        request = adapter.http_request
        with _running(request, execution), adapter.tokens.noticed():
            response = await adapter.arespond()
            if policy.stores is None and not hasattr(response, "context_data"):
                return result_of(adapter, response, policy)
            # It may ask the database.
            return await sync_to_async(result_of)(adapter, response, policy)

    with _explained(plan.operation, policy):
        recover, admit = _recover(adapter, policy), partial(_admit, adapter, policy)
        outcome = await engine.arun(plan.store, plan.operation, execute, recover, admit=admit)
        if isinstance(outcome, Replayed) and has_body(outcome.record):
            return _marked(plan, _response(adapter, policy, plan, outcome))
        respond = sync_to_async(_response)  # what rebuilds an answer may ask the database
        return _marked(plan, await respond(adapter, policy, plan, outcome))


@contextmanager
def _running(request: HttpRequest, execution: ExecutionContext) -> Iterator[None]:
    """Show the view its execution, which ends with this run: a second one needs its own claim."""
    request.idempotency = execution  # type: ignore[attr-defined]  # ours, for the view
    try:
        yield
    finally:
        request.idempotency = None  # type: ignore[attr-defined]


def _marked(plan: Plan, response: HttpResponseBase) -> HttpResponseBase:
    """The response, with a header that tells the client its derived key."""
    if plan.derived:
        response[conf.header] = keys.quoted(plan.operation.key)
    return response


def _takes_part(adapter: Adapter, policy: Policy) -> bool:
    return unclaimed(adapter.http_request) and adapter.method in policy.methods


def _atomic(plan: Plan, transactions: RequestTransactions | None) -> Atomic:
    """The transactions that are to surround the handler."""
    if transactions is None:  # then those that are open were opened by Django
        what = f"The answer of {plan.operation.name}"
        refuse_others(what, plan.store.using, opened_by_django())
        return Atomic()
    return transactions


def _with_session(adapter: Adapter, policy: Policy, store: Store, before: Before) -> Result:
    """Run the view in the claim's transaction, and save in it what it wrote to the session."""
    before.forget_cached_at_commit(adapter.http_request, store.using)
    answer = result_of(adapter, adapter.respond(), policy)
    if answer.payload is not None:
        save_session(adapter.http_request, store.using)
    return answer


def _recover(adapter: Adapter, policy: Policy) -> Callable[[Exception], Result]:
    def recover(error: Exception) -> Result:
        if isinstance(error, IdempotencyError) and not error.foreign:
            raise error  # ours, not the view's
        with adapter.tokens.noticed():
            response = adapter.recover(error, policy)
        return result_of_error(adapter, response, error, policy)

    return recover


def _admit(adapter: Adapter, policy: Policy, record: Record) -> None:
    """Allow a replay, or raise the error that the caller gets instead."""
    adapter.authorize(record, policy)
    if record.payload is not None:  # first who may know of it at all, then in which form
        adapter.refuse_unacceptable(record.payload)


@contextmanager
def _explained(operation: Operation, policy: Policy) -> Iterator[None]:
    """Log a fault of the server, and tell the client when to retry."""
    try:
        yield
    except IdempotencyError as error:
        if error.foreign:
            raise
        if error.status >= 500:
            logger.exception("%s could not be made safe to retry.", operation.name)
        if isinstance(error, OperationInProgress | StoreUnavailable):
            error.retry_after = _retry_after(policy)
        raise


def _response(adapter: Adapter, policy: Policy, plan: Plan, outcome: Outcome) -> HttpResponseBase:
    match outcome:
        case Executed(response):
            return cast("HttpResponseBase", response)
        case Replayed(record):
            return _replay(adapter, policy, record)
        case InProgress():
            if policy.on_conflict == "accepted":
                retry_after = _retry_after(policy)
                return adapter.native(accepted(plan.store, plan.operation, retry_after))
            raise refusal(outcome)
        case Held() | Mismatched():
            raise refusal(outcome)
        case _:
            assert_never(outcome)


def _retry_after(policy: Policy) -> int:
    return max(1, math.ceil(policy.retry_after.total_seconds()))


def _replay(adapter: Adapter, policy: Policy, record: Record) -> HttpResponseBase:
    payload = record.payload
    if payload is None or not has_body(record):
        response = adapter.rebuild(record, policy)
        response[conf.replayed_header] = "true"
        return response
    return adapter.native(adapter.replayed(payload, policy))
