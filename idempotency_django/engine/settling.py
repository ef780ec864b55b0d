"""The end of an attempt that did not complete is recorded and announced.

If it was the last attempt that is allowed, the operation is held for an operator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from django.db import Error as DatabaseFault
from django.dispatch import Signal

from .. import signals
from ..errors import IdempotencyError
from ..stores import Store
from ..stores.records import Claim, Payload
from .outcomes import Result, announce, failure

logger = logging.getLogger("idempotency_django")

INTERRUPTED_ERROR: Final = "The attempts before it were interrupted."
"""The reason for holding a key whose last attempt was not executed."""


def settle(
    claim: Claim, result: Result, record: Callable[[Payload | None, Result], Signal | None]
) -> Payload | None:
    """Record how the attempt ended, or store the response to its error.

    If it cannot be recorded, the client gets its response all the same.

    Args:
        claim: the attempt's.
        result: what it ended with.
        record: stores the response, if there is one, or else the failure. It returns the signal of
            the end, or ``None`` after a signal of its own.

    Returns:
        What is stored of the response, if anything is.

    Raises:
        Exception: the response could not be made; the key is free.
    """
    payload, unmade = _payload_of(result)
    if unmade is not None:
        result = failure(unmade)
    signal: Signal | None = end_signal(result)
    try:
        signal = record(payload, result)
    except (IdempotencyError, DatabaseFault):
        logger.warning(
            "The end of attempt %d of %s could not be recorded (%s). A retry of %s is %s.",
            claim.attempt,
            claim.operation.name,
            result.error,
            claim.key,
            _fate(claim),
            exc_info=True,
        )
    if signal is not None:
        announce(signal, claim, **({} if signal is signals.lost else {"error": result.error}))
    if unmade is not None:
        raise unmade
    return payload if signal is None else None


def _payload_of(result: Result) -> tuple[Payload | None, Exception | None]:
    """The payload to store after a rollback, or the error that prevented one."""
    if not callable(result.payload):
        return result.payload, None
    try:
        return result.payload(), None
    except Exception as error:  # noqa: BLE001  # it is raised when the key is free
        return None, error


def _fate(claim: Claim) -> str:
    """What becomes of a retry while the end of its attempt is not recorded."""
    if claim.operation.lease is None:
        return "executed again"
    return f"{'held' if claim.operation.hold else 'executed again'} after the lease expires"


def end_signal(result: Result) -> Signal:
    """The signal of an attempt whose key is free again."""
    return signals.failed if result.failed else signals.released


def fail(store: Store, claim: Claim, result: Result, *, pinned: bool) -> bool:
    """Record that an attempt failed; its key is held if that was the last one that is allowed."""
    limit = claim.operation.max_attempts
    held = result.failed and limit is not None and claim.attempt >= limit
    recorded = store.fail(claim, result.error, pinned=pinned, held=held)
    if recorded and held:
        _log_held(claim, result.error)
    return recorded


def hold_exhausted(store: Store, claim: Claim) -> bool:
    """Hold a claim whose attempts are used up by interruptions. ``False``: it may be executed.

    After a failure there is one attempt more: an operator has released it.
    """
    limit = claim.operation.max_attempts
    if limit is None or claim.attempt <= limit or not claim.interrupted:
        return False
    if store.fail(claim, INTERRUPTED_ERROR, held=True):
        _log_held(claim, INTERRUPTED_ERROR)
    return True


def _log_held(claim: Claim, error: str) -> None:
    """Tell the operator, who must settle it."""
    logger.error(
        "%s is held after attempt %d (max_attempts=%d), until an operator completes or releases "
        "it: %s (key %s)",
        claim.operation.name,
        claim.attempt,
        claim.operation.max_attempts,
        error,
        claim.key,
    )
