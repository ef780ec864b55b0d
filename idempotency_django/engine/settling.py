"""How an attempt ended, as it is recorded and announced."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from django.db import Error as DatabaseFault
from django.dispatch import Signal

from .. import signals
from ..errors import ClaimLost, IdempotencyError, OperationInProgress, StoreUnavailable
from ..records import Claim, Operation, Payload, Record, Status
from ..stores import Store
from .context import ExecutionContext
from .drivers import Driver
from .leases import Lease
from .outcomes import Result, announce, end_signal, failure, make_payload

logger = logging.getLogger("idempotency_django")

INTERRUPTED_ERROR: Final = "The attempts before it were interrupted."
"""Why a key is held although its last attempt was not executed."""

PERSISTENCE: Final = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts to store the answer of what is already done."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt in the leased mode, and what is to be known of it.

    Attributes:
        driver: calls the store; it knows what the handler did.
        lease: the attempt's lease; it knows the claim and the store.
        execution: what the handler gets.
    """

    driver: Driver
    lease: Lease
    execution: ExecutionContext

    @property
    def claim(self) -> Claim:
        """The right to execute."""
        return self.lease.claim

    async def announce(self, signal: Signal, **arguments: Any) -> None:
        """Send a signal. Its receivers may query the database, so no event loop waits for them."""
        if signal.has_listeners(Operation):
            await self.driver.call(announce, signal, self.claim, **arguments)

    async def record(self) -> Record | None:
        """The record as it is now."""
        return await self.driver.call(self.lease.store.get, self.claim.key, self.claim.scope)

    async def complete(self, payload: Payload) -> None:
        """Store the answer of what was done.

        Raises:
            ClaimLost: the claim has another owner now.
        """
        if await self.driver.call(self.lease.store.complete, self.claim, payload):
            return
        # Unless it was stored at an earlier try, whose answer did not arrive.
        if not self.is_stored(payload, await self.record()):
            raise ClaimLost

    async def complete_in_time(self, payload: Payload) -> bool:
        """:meth:`complete`, as often as needed; ``False``: the store could not be reached."""
        for pause in (*PERSISTENCE, None):
            try:
                await self.complete(payload)
            except (StoreUnavailable, OperationInProgress):
                if pause is None or self.lease.is_over:
                    logger.exception(
                        "%s was executed, but its answer could not be stored. A retry of %s is "
                        "%s after the lease expires.",
                        self.claim.operation.name,
                        self.claim.key,
                        "held" if self.claim.operation.hold else "executed again",
                    )
                    return False
            else:
                return True
            await self.driver.pause(pause, to_the_end=True)
        raise AssertionError

    async def settle(self, result: Result) -> None:
        """Record that it did not complete, and why, or the answer that is stored nevertheless.

        If the handler had a result to be stored, that stays so when a hook fails after the commit.
        """
        payload, unmade = None, None
        if callable(result.payload):
            payload, unmade = await self.driver.call(make_payload, result)
            result = result if unmade is None else failure(unmade)
        signal = end_signal(result)
        try:
            recorded = await self._recorded(payload, result)
            if not recorded:
                record = await self.record()
                if self.is_stored(self.driver.payload, record):
                    recorded, payload = True, self.driver.payload
                elif payload or not self._has_failed(record):
                    signal = signals.lost  # else it was recorded at the first try
            if recorded and payload:
                await self.announce(signals.completed, payload=payload)
                return
        except (IdempotencyError, DatabaseFault):
            logger.warning(
                "The end of attempt %d of %s could not be recorded (%s). Its key is %s after the "
                "lease expires.",
                self.claim.attempt,
                self.claim.operation.name,
                result.error,
                "held" if self.claim.operation.hold else "free",
                exc_info=True,
            )
        reason = {} if signal is signals.lost else {"error": result.error}
        await self.announce(signal, **reason)
        if unmade is not None:
            raise unmade

    async def _recorded(self, payload: Payload | None, result: Result) -> bool:
        store, claim = self.lease.store, self.claim
        if payload is not None:
            return await self.driver.call(store.complete, claim, payload)
        try:
            return await self._failed(result)
        except (StoreUnavailable, OperationInProgress):
            # The connection may have been lost while the handler ran; the store has a new one now.
            return await self._failed(result)

    async def _failed(self, result: Result) -> bool:
        pinned = self.execution.pinned
        return await self.driver.call(fail, self.lease.store, self.claim, result, pinned=pinned)

    def is_stored(self, payload: Payload | None, record: Record | None) -> bool:
        """Whether a record holds this answer of the attempt; a store may have left out its body."""
        if payload is None or record is None or not self._is_of(record):
            return False
        return record.payload in {payload, replace(payload, body=None)}

    def _has_failed(self, record: Record | None) -> bool:
        if record is None or not self._is_of(record):
            return False
        return record.status is Status.FAILED or record.held

    def _is_of(self, record: Record) -> bool:
        """Whether a record is the one that was claimed, and nobody has claimed it again."""
        mine = (self.claim.attempt, self.claim.record_id)
        return (record.attempt, record.record_id) == mine


def fail(store: Store, claim: Claim, result: Result, *, pinned: bool) -> bool:
    """Record that an attempt failed; its key is held if that was the last one that is allowed."""
    limit = claim.operation.max_attempts
    held = result.failed and limit is not None and claim.attempt >= limit
    recorded = store.fail(claim, result.error, pinned=pinned, held=held)
    if recorded and held:
        log_held(claim, result.error)
    return recorded


def hold_exhausted(store: Store, claim: Claim) -> bool:
    """Hold a claim whose attempts are used up by interruptions; ``False``: it may be executed.

    After a failure there is one attempt more: an operator has released it.
    """
    limit = claim.operation.max_attempts
    if limit is None or claim.attempt <= limit or not claim.interrupted:
        return False
    if store.fail(claim, INTERRUPTED_ERROR, held=True):
        log_held(claim, INTERRUPTED_ERROR)
    return True


def log_held(claim: Claim, error: str) -> None:
    """Tell the operator, who must settle it."""
    logger.error(
        "%s is held after attempt %d (max_attempts=%d), until an operator settles it: %s (key %s)",
        claim.operation.name,
        claim.attempt,
        claim.operation.max_attempts,
        error,
        claim.key,
    )


def settle_rolled_back(store: Store, claim: Claim, result: Result, *, pinned: bool) -> None:
    """Record the end of an attempt in the transactional mode, whose claim was rolled back with it.

    Nothing is recorded if another attempt has begun meanwhile.

    Args:
        store: where the claim was made.
        claim: the attempt's.
        result: why it was rolled back, or the answer that is stored nevertheless.
        pinned: see :meth:`~idempotency_django.stores.base.Store.fail`.
    """
    payload, unmade = make_payload(result)
    if unmade is not None:
        result = failure(unmade)
    # Whoever has completed it meanwhile is not replayed here, so that nothing is counted.
    uncounted = replace(claim.operation, count_replays=False)
    try:
        with store.transaction():
            claim_or_record = store.acquire(uncounted)
            # A record that is not claimed here is not ours, unless the handler has ended its
            # transaction unseen. Where that is to be held, it is left to a person.
            left = None if claim.operation.hold else claim
            mine = claim_or_record if isinstance(claim_or_record, Claim) else left
            if mine and payload is not None and store.complete(mine, payload):
                store.on_commit(partial(announce, signals.completed, mine, payload=payload))
                return
            if mine and payload is None:
                fail(store, mine, result, pinned=pinned)
    except (IdempotencyError, DatabaseFault):
        # The key is free and the client gets its answer; only the audit misses an attempt.
        logger.warning(
            "The end of attempt %d of %s could not be recorded: %s",
            claim.attempt,
            claim.operation.name,
            result.error,
            exc_info=True,
        )
    announce(end_signal(result), claim, error=result.error)
    if unmade is not None:
        raise unmade
