"""The transactional mode: claim, effect and answer are one transaction."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from django.db import Error as DatabaseFault

from .. import signals
from ..errors import ClaimLost, IdempotencyError, OperationInProgress
from ..executions import Execution
from ..policy import Policy
from ..records import Claim, Operation, Payload
from ..stores import Store
from .outcomes import (
    Answer,
    Executed,
    InProgress,
    Outcome,
    Patience,
    Replayed,
    announce_end,
    decide,
    failure,
    send,
)

logger = logging.getLogger("idempotency_django")

Execute = Callable[[Execution], Answer]
Recover = Callable[[Exception], Answer]


class _RolledBack(Exception):  # carries an answer out of a transaction; no error
    def __init__(self, claim: Claim, answer: Answer, error: Exception | None = None) -> None:
        super().__init__(answer.error)
        self.claim = claim
        self.answer = answer
        self.error = error


def run(
    store: Store,
    policy: Policy,
    operation: Operation,
    execute: Execute,
    recover: Recover,
    after: ExitStack | None,
) -> Outcome:
    """Run an operation in a transaction; see :func:`idempotency_django.engine.run`."""
    patience = Patience(policy)
    while True:
        outcome = _run_once(store, operation, execute, recover, after)
        if not isinstance(outcome, InProgress):
            return outcome
        pause = patience.pause()
        if pause is None:
            return outcome
        time.sleep(pause)


def _run_once(
    store: Store,
    operation: Operation,
    execute: Execute,
    recover: Recover,
    after: ExitStack | None,
) -> Outcome:
    known = store.recall(operation) if store.recalls else None
    if known is not None:
        return decide(known, operation)  # type: ignore[return-value]  # it is no claim
    try:
        with store.transaction(after=after):
            decision = decide(store.acquire(operation), operation)
            if isinstance(decision, Replayed) and not decision.record.counted:
                store.record_replay(decision.record, operation)
            if not isinstance(decision, Claim):
                return decision
            return Executed(_execute(store, decision, execute))
    except OperationInProgress:
        if after is not None:
            raise
        return InProgress()
    except _RolledBack as signal:
        rolled_back = signal
    # Outside the except clause, so that an error raised on shows no trace of this detour.
    return Executed(_after_rollback(store, rolled_back, recover, after))


def _execute(store: Store, claim: Claim, execute: Execute) -> Any:
    send(signals.claimed, claim.operation, attempt=claim.attempt)
    # Before the handler's own hooks, one of which may raise and so end them all.
    announce = _announce_completed(store, claim)
    try:
        answer = execute(Execution(store, claim, None))
        if isinstance(answer.payload, Payload):
            if not store.complete(claim, answer.payload):
                raise ClaimLost
            announce(answer.payload)
    except Exception as error:  # noqa: BLE001  # whatever it is, it rolls back and goes on
        raise _RolledBack(claim, failure(error), error) from None
    if answer.payload is None:
        raise _RolledBack(claim, answer)
    return answer.response


def _after_rollback(
    store: Store, rolled_back: _RolledBack, recover: Recover, after: ExitStack | None
) -> Any:
    answer = rolled_back.answer

    def settle() -> None:
        _settle(store, rolled_back.claim, answer)

    try:
        if rolled_back.error is not None:
            answer = recover(rolled_back.error)
    finally:
        if after is None:
            settle()
        else:
            after.callback(settle)
    return answer.response


def _settle(store: Store, claim: Claim, answer: Answer) -> None:
    """Write down how a rolled-back attempt ended, unless somebody else has gone on meanwhile."""
    try:
        payload = answer.payload() if callable(answer.payload) else None
        with store.transaction():
            held = store.acquire(claim.operation)
            if isinstance(held, Claim) and payload is not None:
                announce = _announce_completed(store, held)
                store.complete(held, payload)
                announce(payload)
                return
            if isinstance(held, Claim):
                store.fail(held, answer.error)
    except (IdempotencyError, DatabaseFault):
        # The key is free and the client gets its answer; only the audit misses an attempt.
        logger.warning(
            "How attempt %d of %s ended could not be recorded: %s",
            claim.attempt,
            claim.operation.name,
            answer.error,
            exc_info=True,
        )
    announce_end(claim, answer)


def _announce_completed(store: Store, claim: Claim) -> Callable[[Payload], None]:
    """Prepare the signal; it is sent once the payload is given and committed."""
    stored: list[Payload] = []

    def announce() -> None:
        for payload in stored:
            send(signals.completed, claim.operation, attempt=claim.attempt, payload=payload)

    store.on_commit(announce)
    return stored.append
