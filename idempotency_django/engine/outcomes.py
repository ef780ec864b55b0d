"""The outcomes of an operation: a closed set, decided in one place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, assert_never, overload

from django.db import Error as DatabaseFault
from django.db import InterfaceError, OperationalError, connections, transaction
from django.dispatch import Signal

from .. import signals
from ..errors import (
    FingerprintMismatch,
    IdempotencyError,
    OperationHeld,
    OperationInProgress,
    StoreUnavailable,
)
from ..errors.operations import BUSY_MESSAGE
from ..records import Claim, Operation, Payload, Record, Status
from ..stores import Store
from .failures import named

logger = logging.getLogger("idempotency_django")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an execution.

    Attributes:
        response: the answer in the adapter's own terms; the engine only passes it on.
        payload: what to store of it; ``None`` rolls the attempt back and frees the key. After a
            rollback, a function that makes the payload, called when the transaction has ended.
        error: why the attempt is rolled back, for the audit.
        failed: whether that is a failure (an exception, a 5xx) or only an answer that is not kept.
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
    """Somebody else is executing the operation.

    Attributes:
        remaining: seconds until the owner's lease ends, if it is not renewed; ``None``: unknown.
        busy: whether it may not be in progress at all: something else has locked the database.
    """

    remaining: float | None = field(default=None, compare=False)
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """An attempt was interrupted, and an operator must settle it."""


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The key was used for a different request; this is its record."""

    record: Record


Admit = Callable[[Record], None]
"""Raises to refuse a replay of the record."""

Recover = Callable[[Exception], Result]
"""Turns what a handler raised into an answer, or raises it again."""

Outcome = Executed | Replayed | InProgress | Held | Mismatched


def refusal(outcome: InProgress | Held | Mismatched, what: str = "") -> IdempotencyError:
    """The error that tells the caller why nothing was executed and nothing is replayed.

    Args:
        outcome: what was found.
        what: names the operation in the log of a program that executes many, such as "The event
            'e-17' of '/shop'". By default, the error is about the caller's own request.
    """
    match outcome:
        case InProgress(busy=True):
            return StoreUnavailable(BUSY_MESSAGE)
        case InProgress(remaining):
            error = OperationInProgress(what and what + _IN_PROGRESS)
            error.remaining = remaining
            return error
        case Held():
            return OperationHeld(what and what + _HELD)
        case Mismatched():
            return FingerprintMismatch(what and what + _MISMATCHED)
        case _:
            assert_never(outcome)


_IN_PROGRESS: Final = " is being executed elsewhere. Try again later to get the result."
_HELD: Final = (
    " is held, because its last attempt failed or was interrupted. It is not executed again until "
    "an operator completes or releases its record in the admin."
)
_MISMATCHED: Final = (
    " is on record with other content, so nothing was executed. Look at its record in the admin. "
    "If this is another operation, give it an id or a key of its own."
)


UNCERTAIN_ERRORS: Final = (OperationalError, InterfaceError)
"""What COMMIT raises if nobody knows whether it was done."""


class RolledBack(Exception):  # carries a result out of a transaction; no error
    """Raised to roll back what surrounds a result that is not kept."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.error)
        self.result = result


@overload
def decide(claim_or_record: Record, operation: Operation) -> Outcome: ...


@overload
def decide(claim_or_record: Claim, operation: Operation) -> Claim: ...


def decide(claim_or_record: Claim | Record, operation: Operation) -> Claim | Outcome:
    """The outcome for the record that a store returned; pure."""
    match claim_or_record:
        case Claim():
            return claim_or_record
        case Record(status=Status.COMPLETED, fingerprint=operation.fingerprint):
            return Replayed(claim_or_record)
        case Record(status=Status.IN_PROGRESS, fingerprint=operation.fingerprint, held=True):
            return Held()
        case Record(status=Status.IN_PROGRESS, fingerprint="" | operation.fingerprint):
            return InProgress(claim_or_record.lease_left)
        case Record(status=Status.FAILED, fingerprint=operation.fingerprint):
            return InProgress()  # no answer, and no claim: the store is to free the key for a retry
        case _:
            return Mismatched(claim_or_record)


def in_progress(store: Store, operation: Operation, error: OperationInProgress) -> InProgress:
    """The outcome of an operation that the store was too busy to claim."""
    return InProgress(busy=error.busy and not store.is_running(operation))


def failure(error: Exception) -> Result:
    """The result of an exception, if nothing turns it into another answer."""
    return Result(None, None, error=named(error), failed=True)


def made_payload(result: Result) -> tuple[Payload | None, Exception | None]:
    """The payload to be stored after a rollback, or the error that prevented one."""
    if not callable(result.payload):
        return None, None
    try:
        return result.payload(), None
    except Exception as error:  # noqa: BLE001  # it is raised when the key is free
        return None, error


def announcement(outcome: Outcome) -> tuple[Signal, dict[str, Any]] | None:
    """The signal of an outcome, and its arguments, if it has receivers."""
    match outcome:
        case Replayed(record):
            message: tuple[Signal, dict[str, Any]] = (signals.replayed, {"record": record})
        case InProgress() | Held():
            message = (signals.conflicted, {})
        case Mismatched(record):
            message = (signals.mismatched, {"record": record})
        case Executed():
            return None  # its signals were sent on the way
        case _:
            assert_never(outcome)
    return message if message[0].has_listeners(Operation) else None


def end_signal(result: Result) -> Signal:
    """The signal of an attempt whose key is free again."""
    return signals.failed if result.failed else signals.released


def announce(signal: Signal, claim: Claim, **arguments: Any) -> None:
    """Send a signal of an attempt."""
    if signal.has_listeners(Operation):
        send(signal, claim.operation, attempt=claim.attempt, **arguments)


def send(signal: Signal, operation: Operation, **arguments: Any) -> None:
    """Send a signal. A receiver's error does no harm, not even to the transactions around it."""
    if not signal.has_listeners(Operation):
        return
    try:
        with _savepoints():
            results = signal.send_robust(Operation, operation=operation, **arguments)
            for _, result in results:
                if isinstance(result, DatabaseFault):
                    raise result
    except DatabaseFault:
        logger.warning(
            "A receiver of a signal of %s caused a database error, so what the receivers wrote "
            "in the open transaction was rolled back.",
            operation.name,
            exc_info=True,
        )


@contextmanager
def _savepoints() -> Iterator[None]:
    """A savepoint in each open transaction, to contain the errors of receivers."""
    with ExitStack() as savepoints:
        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block and not connection.needs_rollback:
                with suppress(DatabaseFault):  # it is spoilt already, by somebody else
                    savepoints.enter_context(transaction.atomic(using=connection.alias))
        yield
