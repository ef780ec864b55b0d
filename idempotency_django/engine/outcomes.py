"""The outcomes of an operation: a closed set, made of a store's reply in one place.

The store decides who may claim an operation. :func:`decide` says what its record means to others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any, Final, assert_never

from django.db import Error as DatabaseFault
from django.db import connections, transaction
from django.dispatch import Signal

from .. import signals
from ..backoff import Backoff
from ..errors import (
    BUSY_MESSAGE,
    FingerprintMismatch,
    IdempotencyError,
    KeyExpired,
    OperationHeld,
    OperationInProgress,
    StoreUnavailable,
)
from ..stores import Store
from ..stores.records import Claim, Operation, Payload, Record, Status

logger = logging.getLogger("idempotency_django")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an execution.

    Attributes:
        response: what the adapter sends, in its own terms; the engine only passes it on.
        payload: what to store of it. ``None`` rolls the attempt back and frees the key. After a
            rollback, it may be a function that makes the payload when the transaction has ended.
        error: why the attempt is rolled back, for the audit.
        failed: whether that is a failure (an exception, a 5xx) or only a response that is not kept.
    """

    response: Any
    payload: Payload | Callable[[], Payload] | None
    error: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Executed:
    """The operation was executed by this call, successfully or not.

    Attributes:
        response: what the adapter sends, in its own terms.
        payload: what was stored of it, if anything was.
        rolled_back: what the attempt ended with, if it was rolled back.
        error: what the handler raised, or what prevented the commit, if anything did.
    """

    response: Any
    payload: Payload | None = field(default=None, compare=False, repr=False)
    rolled_back: Result | None = field(default=None, compare=False, repr=False)
    error: Exception | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The operation was executed before; this is its record."""

    record: Record


@dataclass(frozen=True, slots=True)
class Expired:
    """The operation was executed before, and its record has expired, but is retained."""

    record: Record


@dataclass(frozen=True, slots=True)
class InProgress:
    """Another attempt is executing the operation.

    Attributes:
        remaining: seconds until the owner's lease ends, if it is not renewed and if they are known.
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
"""Turns a handler's exception into a result, or raises it again."""

Outcome = Executed | Replayed | Expired | InProgress | Held | Mismatched


def refusal(outcome: Expired | InProgress | Held | Mismatched, what: str = "") -> IdempotencyError:
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
        case Expired():
            return KeyExpired(what and what + _EXPIRED)
        case Mismatched():
            return FingerprintMismatch(what and what + _MISMATCHED)
        case _:
            assert_never(outcome)


_IN_PROGRESS: Final = " is being executed by another process. Try again later to get the result."
_HELD: Final = (
    " is held, because its last attempt failed or was interrupted. It is not executed again until "
    "an operator completes or releases its record in the admin."
)
_EXPIRED: Final = (
    " was executed, and its result has expired. It is not executed again. Look up what it did."
)
_MISMATCHED: Final = (
    " was already used with different content, so nothing was executed. Check its record in the "
    "admin. If this is a new operation, give it a new id or key."
)


class RolledBack(Exception):  # no error: it carries a result out of a transaction
    """Raised with a result that is not kept, to roll back what was done for it."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.error)
        self.result = result


def decide(record: Record, operation: Operation) -> Outcome:
    """The outcome for the record that a store returned. Asks and changes nothing."""
    match record:
        case Record(status=Status.IN_PROGRESS, fingerprint=""):  # its transaction is still open
            return InProgress(record.lease_left)
        case Record() if record.fingerprint not in operation.fingerprints:
            return Mismatched(record)
        case Record(status=Status.COMPLETED, expired=True) if operation.refuse_expired:
            return Expired(record)
        case Record(status=Status.COMPLETED):
            return Replayed(record)
        case Record(held=True):
            return Held()
        case _:  # a failed one has neither response nor claim: the store is to free the key
            return InProgress(record.lease_left)


def admitted(record: Record, operation: Operation, admit: Admit | None) -> Outcome:
    """:func:`decide`, if the caller may have what the record tells; else what ``admit`` raises."""
    outcome = decide(record, operation)
    if admit is not None and isinstance(outcome, Replayed | Expired):
        admit(record)
    return outcome


def acquire(store: Store, operation: Operation) -> Claim | Record:
    """Claim the operation, or return its record.

    An attempt from before a rotation of ``SECRET_KEY`` is resumed with the fingerprint of then,
    which the handler has derived its keys from.
    """
    claim_or_record = store.acquire(operation)
    if isinstance(claim_or_record, Claim):
        return claim_or_record
    stored = claim_or_record.fingerprint
    if stored not in operation.former_fingerprints:
        return claim_or_record
    return store.acquire(replace(operation, fingerprint=stored, former_fingerprints=()))


def reraise(error: Exception) -> Result:
    """A :data:`Recover` for handlers whose errors go to the caller as they are."""
    raise error


def text_of(error: BaseException) -> str:
    """The text of an error, also if its own ``__str__()`` fails."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001  # the error is reported anyway
        return f"str() of the error failed ({type(failure).__name__})"


def describe_error(error: BaseException) -> str:
    """The class of an error and its text, for records and logs."""
    return f"{type(error).__name__}: {text_of(error)}"


def failure(error: BaseException) -> Result:
    """The result of an exception, if nothing turns it into another response."""
    return Result(None, None, error=describe_error(error), failed=True)


_SIGNALS: Final[dict[type[Outcome], Signal]] = {
    Replayed: signals.replayed,
    InProgress: signals.conflicted,
    Held: signals.conflicted,
    Expired: signals.conflicted,
    Mismatched: signals.mismatched,
}


def signal_of(outcome: Outcome) -> Signal | None:
    """The signal of an outcome, if it has receivers; those of an execution are sent on the way."""
    signal = _SIGNALS.get(type(outcome))
    return signal if signal is not None and signal.has_listeners(Operation) else None


def announce_outcome(outcome: Outcome, operation: Operation) -> None:
    """Send the signal of an outcome."""
    if signal := signal_of(outcome):
        arguments = {}
        if isinstance(outcome, Replayed | Mismatched):
            arguments["record"] = outcome.record
        send(signal, operation, **arguments)


def announce(signal: Signal, claim: Claim, **arguments: Any) -> None:
    """Send a signal of an attempt."""
    send(signal, claim.operation, attempt=claim.attempt, **arguments)


def send(signal: Signal, operation: Operation, **arguments: Any) -> None:
    """Send a signal. A receiver's error harms neither the operation nor an open transaction."""
    if not signal.has_listeners(Operation):
        return
    try:
        with savepoints():
            results = signal.send_robust(Operation, operation=operation, **arguments)
            for _, result in results:
                if isinstance(result, DatabaseFault):
                    raise result
    except DatabaseFault:
        logger.warning(
            "A receiver of a signal of %s caused a database error, so the receivers' writes in "
            "the open transaction were rolled back.",
            operation.name,
            exc_info=True,
        )


@contextmanager
def savepoints() -> Iterator[None]:
    """A savepoint in each open transaction, to contain database errors of receivers."""
    with ExitStack() as savepoints:
        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block and not connection.needs_rollback:
                with suppress(DatabaseFault):  # it is spoilt already
                    savepoints.enter_context(transaction.atomic(using=connection.alias))
        yield


BACKOFF: Final = Backoff(timedelta(seconds=0.02), timedelta(seconds=0.25))
"""The polling interval while waiting for an operation."""


async def wait_until_settled(
    longest: timedelta | None,
    look: Callable[[], Awaitable[Outcome]],
    pause: Callable[[float], Awaitable[None]],
) -> Outcome:
    """The outcome of the last look: nothing else is executing, or the wait is over.

    Args:
        longest: how long to wait, from now. ``None`` does not wait at all.
        look: runs the operation, or finds out what others do with it.
        pause: waits for so many seconds.
    """
    ends_at = time.monotonic() + longest.total_seconds() if longest else 0.0
    for looks in count(1):
        outcome = await look()
        left = ends_at - time.monotonic()
        if left <= 0 or not isinstance(outcome, InProgress):
            return outcome
        await pause(min(BACKOFF.jittered(looks).total_seconds(), left))
    raise AssertionError
