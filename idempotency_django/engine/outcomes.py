"""The outcomes of an operation: a closed set, decided in one place."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
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
)
from ..records import Claim, Operation, Payload, Record, Status

logger = logging.getLogger("idempotency_django")

FIRST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 0.25
"""Seconds between two looks at an operation while waiting; they grow from first to longest."""


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
    """Somebody else is executing the operation."""


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


def refusal(outcome: InProgress | Held | Mismatched) -> IdempotencyError:
    """The error that tells the caller why nothing was executed and nothing is replayed."""
    match outcome:
        case InProgress():
            return OperationInProgress()
        case Held():
            return OperationHeld()
        case Mismatched():
            return FingerprintMismatch()
        case _:
            assert_never(outcome)


UNCERTAIN_ERRORS: Final = (OperationalError, InterfaceError)
"""What COMMIT raises if nobody knows whether it was done."""


class RolledBack(Exception):  # carries a result out of a transaction; no error
    """Raised to roll back what surrounds a result that is not kept."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.error)
        self.result = result


@overload
def decide(found: Record, operation: Operation) -> Outcome: ...


@overload
def decide(found: Claim, operation: Operation) -> Claim: ...


def decide(found: Claim | Record, operation: Operation) -> Claim | Outcome:
    """The outcome for the record that a store returned; pure."""
    match found:
        case Claim():
            return found
        case Record(status=Status.IN_PROGRESS, fingerprint=operation.fingerprint, held=True):
            return Held()
        case Record(status=Status.IN_PROGRESS, fingerprint="" | operation.fingerprint):
            return InProgress()
        case Record(status=Status.FAILED, fingerprint=operation.fingerprint):
            return InProgress()  # no answer, and no claim: the store is to free the key for a retry
        case Record(fingerprint=operation.fingerprint):
            return Replayed(found)
        case _:
            return Mismatched(found)


class ConflictWait:
    """How long to wait for an operation in progress, and how often to look.

    Args:
        longest: how long, from now; ``None``: not at all.
    """

    def __init__(self, longest: timedelta | None) -> None:
        self._deadline = time.monotonic() + longest.total_seconds() if longest else 0.0
        self._pause = FIRST_PAUSE

    def pause(self, outcome: Outcome) -> float | None:
        """Seconds until the next look; ``None``: the outcome stands, or the wait is over."""
        if not isinstance(outcome, InProgress):
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            return None
        pause = self._pause * random.uniform(0.5, 1)  # noqa: S311  # not a secret
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        return min(pause, left)

    async def last(
        self,
        look: Callable[[], Awaitable[Outcome]],
        pause: Callable[[float], Awaitable[None]],
    ) -> Outcome:
        """What the last look finds: when nobody else is executing, or the wait is over."""
        while True:
            outcome = await look()
            seconds = self.pause(outcome)
            if seconds is None:
                return outcome
            await pause(seconds)


def failure(error: Exception) -> Result:
    """The result of an exception, if nothing turns it into another answer."""
    return Result(None, None, error=f"{type(error).__name__}: {error}", failed=True)


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
            found: tuple[Signal, dict[str, Any]] = (signals.replayed, {"record": record})
        case InProgress() | Held():
            found = (signals.conflicted, {})
        case Mismatched(record):
            found = (signals.mismatched, {"record": record})
        case Executed():
            return None  # its signals were sent on the way
        case _:
            assert_never(outcome)
    return found if found[0].has_listeners(Operation) else None


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
