"""How an attempt ended, as it is recorded and announced."""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from typing import Any

from django.db import Error as DatabaseFault
from django.dispatch import Signal

from .. import signals
from ..errors import IdempotencyError, OperationInProgress, StoreUnavailable
from ..records import Claim, Operation, Payload, Record, Status
from .drivers import Ask, Call, Execute, Wish
from .outcomes import Result, failure, send

logger = logging.getLogger("idempotency_django")


def tell(claim: Claim, signal: Signal, **arguments: Any) -> Generator[Wish, Any, None]:
    """Send a signal. Its receivers may query the database, which must not block an event loop."""
    if signal.has_listeners(Operation):
        told = {"attempt": claim.attempt, **arguments}
        yield Call(partial(send, signal, claim.operation, **told))


def settle(claim: Claim, answer: Result, work: Execute) -> Generator[Wish, Any, None]:
    """Record the end of an attempt that did not complete.

    Args:
        claim: the attempt's.
        answer: the result of the execution.
        work: its handler. If the handler had a result to be stored, that stays so when a hook fails
            after the commit.
    """
    done = work.payload
    payload, unmade = None, None
    if callable(answer.payload):
        try:
            payload = yield Call(answer.payload)
        except Exception as error:  # noqa: BLE001  # raised below, when the key is free
            unmade, answer = error, failure(error)
    signal = signals.failed if answer.failed else signals.released
    try:
        settled = yield from _write(claim, payload, answer.error, work)
        if not settled:
            found = yield Ask("get", (claim.key, claim.scope))
            if is_stored(claim, done, found):
                settled, payload = True, done
            elif payload or not _is_of(claim, found) or found.status is not Status.FAILED:
                signal = signals.lost  # else it was recorded at the first try
        if settled and payload:
            yield from tell(claim, signals.completed, payload=payload)
            return
    except (IdempotencyError, DatabaseFault):
        logger.warning(
            "The end of attempt %d of %s could not be recorded (%s). Its key is %s after the "
            "lease expires.",
            claim.attempt,
            claim.operation.name,
            answer.error,
            "held" if claim.operation.hold else "free",
            exc_info=True,
        )
    reason = {} if signal is signals.lost else {"error": answer.error}
    yield from tell(claim, signal, **reason)
    if unmade is not None:
        raise unmade


def _write(
    claim: Claim, payload: Payload | None, error: str, work: Execute
) -> Generator[Wish, Any, bool]:
    fail = Ask("fail", (claim, error), {"pinned": work.execution.pinned})
    if payload is not None:
        return (yield Ask("complete", (claim, payload)))  # type: ignore[no-any-return]
    try:
        return (yield fail)  # type: ignore[no-any-return]
    except (StoreUnavailable, OperationInProgress):
        # The connection may have been lost while the handler ran; the store has a new one now.
        return (yield fail)  # type: ignore[no-any-return]


def is_stored(claim: Claim, payload: Payload | None, found: Record | None) -> bool:
    """Whether a record holds this answer of the claim's; a store may have left out its body."""
    if payload is None or found is None:
        return False
    return _is_of(claim, found) and found.payload in {payload, replace(payload, body=None)}


def _is_of(claim: Claim, found: Record | None) -> bool:
    """Whether a record is the one that was claimed, and nobody has claimed it again."""
    mine = (claim.attempt, claim.record_id)
    return found is not None and (found.attempt, found.record_id) == mine
