"""One HTTP request, through policy, engine and back: what every HTTP adapter has in common.

An adapter adds an :class:`Exchange`: how its framework runs a view, and what it makes of an error.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from typing import assert_never, cast

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from . import engine, keys
from .conf import conf
from .engine import Answer, Executed, InProgress, Mismatched, Outcome, Replayed
from .errors import (
    FingerprintMismatch,
    IdempotencyError,
    OperationInProgress,
    ResponseNotStored,
    StoreUnavailable,
)
from .http import call_of, key_header, payload_of, rendered, response_of
from .policy import Policy
from .records import Call, Claim, Operation, Payload, Record
from .stores import stores
from .transactions import RequestTransactions

logger = logging.getLogger("idempotency_django")


class Exchange(ABC):
    """One request and its answer, as an adapter's framework handles them."""

    def __init__(self, request: HttpRequest) -> None:
        self.http_request = request

    def header(self) -> str | None:
        """The key as the client sent it; ``None`` when it sent none."""
        return key_header(self.http_request)

    def call(self) -> Call:
        """What the policy needs to know of the request."""
        return call_of(self.http_request)

    def scope(self) -> str | None:
        """What the key is unique in, where that is not for the policy to say."""
        return None

    @abstractmethod
    def respond(self) -> HttpResponseBase:
        """Run the view and render its answer."""

    @abstractmethod
    def recover(self, error: Exception, policy: Policy) -> HttpResponseBase:
        """The answer to what the view raised, rendered or not, or the error again."""

    def rebuild(self, record: Record, policy: Policy) -> HttpResponseBase:
        """The answer of a record whose body was not kept.

        Raises:
            ResponseNotStored: nobody knows how to make it.
        """
        if policy.rebuild is None:
            raise ResponseNotStored
        response: HttpResponseBase = policy.rebuild(record, self.http_request)
        return response


def unclaimed(request: HttpRequest) -> bool:
    """Give the request its ``idempotency``, ``None`` so far; ``False``: it has a claim already."""
    claim = getattr(request, "idempotency", None)
    request.idempotency = claim  # type: ignore[attr-defined]  # ours, for the view
    return claim is None


def serve(
    exchange: Exchange, policy: Policy, transactions: RequestTransactions | None = None
) -> HttpResponseBase:
    """Answer a request: run its view once per operation, replay, or refuse.

    A view that is already being run for a claimed operation is just run.

    Args:
        exchange: the request, as its adapter handles it.
        policy: the view's policy, resolved.
        transactions: what the adapter opened around the request.

    Raises:
        IdempotencyError: the request is refused; nothing was executed, or all was rolled back.
    """
    method = exchange.http_request.method or ""
    if not unclaimed(exchange.http_request) or method not in policy.methods:
        return exchange.respond()
    key = policy.client_key_of(exchange.header())
    if key is None and policy.key is None:
        policy.refuse_missing(method)
        return exchange.respond()
    call = exchange.call()
    derived = key is None
    if key is None:
        key = policy.derived_key_of(call)
    if key is None:
        policy.refuse_missing(method)
        return exchange.respond()
    if not derived:
        policy.refuse_guessable(call, key)
    operation = policy.operation_for(call, key=key, scope=exchange.scope())
    response = _through_engine(exchange, policy, operation, transactions)
    if derived:
        response[conf.header] = keys.quoted(key)
    return response


def _through_engine(
    exchange: Exchange,
    policy: Policy,
    operation: Operation,
    transactions: RequestTransactions | None,
) -> HttpResponseBase:
    retry_after = max(1, math.ceil(policy.retry_after.total_seconds()))
    try:
        outcome = _run(exchange, policy, operation, transactions)
    except IdempotencyError as error:
        if error.status >= 500:
            logger.exception("%s could not be made safe to retry.", operation.name)
        if isinstance(error, OperationInProgress | StoreUnavailable):
            error.retry_after = retry_after
        raise
    match outcome:
        case Executed(response):
            return cast("HttpResponseBase", response)
        case Replayed(record):
            return _replay(exchange, policy, record)
        case InProgress():
            raise OperationInProgress(retry_after=retry_after)
        case Mismatched():
            raise FingerprintMismatch
        case _:
            assert_never(outcome)


def _run(
    exchange: Exchange,
    policy: Policy,
    operation: Operation,
    transactions: RequestTransactions | None,
) -> Outcome:
    def execute(claim: Claim) -> Answer:
        exchange.http_request.idempotency = claim  # type: ignore[attr-defined]
        return _answer(exchange.respond(), policy)

    def recover(error: Exception) -> Answer:
        if isinstance(error, IdempotencyError):
            raise error  # ours, not the view's
        return _answer_to_error(exchange.recover(error, policy), error, policy)

    store = stores[policy.store]
    after = transactions.around(store) if transactions else None
    return engine.run(store, policy, operation, execute, recover, after=after)


def _replay(exchange: Exchange, policy: Policy, record: Record) -> HttpResponseBase:
    payload = record.payload
    if payload is None or payload.body is None:
        response = exchange.rebuild(record, policy)
        response[conf.replayed_header] = "true"
        return response
    return response_of(payload, policy)


def _answer(response: HttpResponseBase, policy: Policy) -> Answer:
    status = response.status_code
    if policy.keeps(status):
        return Answer(response, payload_of(response, policy))
    return Answer(response, None, error=f"The answer was {status}.", failed=status >= 500)


def _answer_to_error(response: HttpResponseBase, error: Exception, policy: Policy) -> Answer:
    def payload() -> Payload:
        return payload_of(rendered(response), policy)

    status = response.status_code
    kept = payload if policy.keeps_raised(status) else None
    reason = f"{type(error).__name__}: {error}"
    return Answer(response, kept, error=reason, failed=kept is None and status >= 500)
