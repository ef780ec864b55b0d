"""The state machine behind every adapter: claim, execute, complete, or say why not.

:func:`run` knows nothing of HTTP and no concrete store. An adapter gives it an operation and a
function that executes it, and matches the :data:`Outcome` it returns.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, assert_never

from django.db import Error as DatabaseFault
from django.dispatch import Signal

from . import signals
from .errors import ClaimLost, IdempotencyError, OperationInProgress
from .policy import Policy
from .records import Claim, Operation, Payload, Record, Status
from .stores import Store

logger = logging.getLogger("idempotency_django")

FIRST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 0.25
"""Seconds between two looks at an operation that is waited for; they grow from first to longest."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an execution came to.

    Attributes:
        response: the answer in the adapter's own terms; the engine only passes it on.
        payload: what to store of it; ``None`` rolls the attempt back and frees the key. After a
            rollback, a function that makes it: it is called when the transaction has ended.
        error: why the attempt is rolled back, for the audit.
        failed: whether that is a failure (an exception, a 5xx) or just no answer to keep.
    """

    response: Any
    payload: Payload | Callable[[], Payload] | None
    error: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Executed:
    """The operation was executed by this call, successfully or not."""

    response: Any


@dataclass(frozen=True, slots=True)
class Replayed:
    """The operation was executed before; this is its record."""

    record: Record


@dataclass(frozen=True, slots=True)
class InProgress:
    """Somebody else is executing the operation."""


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The key was used for a different request; this is its record."""

    record: Record


Outcome = Executed | Replayed | InProgress | Mismatched


def decide(
    found: Claim | Record, operation: Operation
) -> Claim | Replayed | InProgress | Mismatched:
    """What follows from what a store said; pure."""
    match found:
        case Claim():
            return found
        case Record(status=Status.IN_PROGRESS, fingerprint="" | operation.fingerprint):
            return InProgress()
        case Record(fingerprint=operation.fingerprint):
            return Replayed(found)
        case _:
            return Mismatched(found)


Execute = Callable[[Claim], Answer]
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
    *,
    after: ExitStack | None = None,
) -> Outcome:
    """Execute the operation once, or say what became of it before.

    What ``execute`` writes and the answer it returns are committed together. When it raises, or
    returns an answer without a payload, all of it is rolled back and the key is free again.

    Args:
        store: where the record lives.
        policy: a resolved policy.
        operation: what is to be executed.
        execute: does it, inside the transaction.
        recover: called after the rollback with what ``execute`` raised; returns the answer, or
            raises the error on. A payload in its answer is stored.
        after: given by a caller whose own transaction surrounds this call: it runs these
            callbacks when that has ended. Without it, the transaction is opened here.

    Raises:
        StoreUnavailable: nothing was executed, or all of it was rolled back.
        OperationInProgress: as the outcome, where the caller's transaction is spoilt by it.
    """
    deadline = time.monotonic() + policy.wait_timeout.total_seconds()
    pause = FIRST_PAUSE
    while True:
        outcome = _run_once(store, operation, execute, recover, after)
        left = deadline - time.monotonic()
        if not isinstance(outcome, InProgress) or policy.on_conflict == "reject" or left <= 0:
            break
        time.sleep(min(pause * random.uniform(0.5, 1), left))  # noqa: S311  # not a secret
        pause = min(pause * 2, LONGEST_PAUSE)
    _announce(outcome, operation)
    return outcome


def _run_once(
    store: Store,
    operation: Operation,
    execute: Execute,
    recover: Recover,
    after: ExitStack | None,
) -> Outcome:
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
    _send(signals.claimed, claim.operation, attempt=claim.attempt)
    # Before the handler's own hooks, one of which may raise and so end them all.
    announce = _announce_completed(store, claim)
    try:
        answer = execute(claim)
        if isinstance(answer.payload, Payload):
            if not store.complete(claim, answer.payload):
                raise ClaimLost
            announce(answer.payload)
    except Exception as error:  # noqa: BLE001  # whatever it is, it rolls back and goes on
        raise _RolledBack(claim, _failure(error), error) from None
    except BaseException as exit_request:
        if not store.supports_transactions:
            store.fail(claim, repr(exit_request))
        raise
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
            held = store.acquire(claim.operation) if store.supports_transactions else claim
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
    signal = signals.failed if answer.failed else signals.released
    _send(signal, claim.operation, attempt=claim.attempt, error=answer.error)


def _failure(error: Exception) -> Answer:
    return Answer(None, None, error=f"{type(error).__name__}: {error}", failed=True)


def _announce_completed(store: Store, claim: Claim) -> Callable[[Payload], None]:
    """Prepare the signal; it is sent once the payload is given and committed."""
    stored: list[Payload] = []

    def send() -> None:
        for payload in stored:
            _send(signals.completed, claim.operation, attempt=claim.attempt, payload=payload)

    if store.supports_transactions:
        store.on_commit(send)
        return stored.append

    def send_now(payload: Payload) -> None:
        stored.append(payload)
        send()

    return send_now


def _announce(outcome: Outcome, operation: Operation) -> None:
    match outcome:
        case Replayed(record):
            _send(signals.replayed, operation, record=record)
        case InProgress():
            _send(signals.conflicted, operation)
        case Mismatched(record):
            _send(signals.mismatched, operation, record=record)
        case Executed():
            return  # its signals were sent on the way
        case _:
            assert_never(outcome)


def _send(signal: Signal, operation: Operation, **arguments: Any) -> None:
    signal.send_robust(Operation, operation=operation, **arguments)
