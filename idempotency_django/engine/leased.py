"""The leased mode: the claim is committed first, so that all can see it while its owner executes.

In reading order: claim, run, settle, superseded. What asks the store is a plain function that a
driver calls, at once for a sync handler and in a thread for an async one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final, TypeGuard

from django.dispatch import Signal

from .. import signals
from ..errors import ClaimLost, IdempotencyError, OperationInProgress, StoreUnavailable
from ..stores import Store
from ..stores.records import Claim, Operation, Payload, Record, Status
from .context import ExecutionContext, entered
from .flows import Awaiting, Blocking
from .leases import Lease, kept_alive
from .outcomes import (
    Admit,
    Executed,
    Held,
    InProgress,
    Outcome,
    Recover,
    Replayed,
    Result,
    RolledBack,
    acquire,
    admitted,
    announce,
    failure,
    wait_until_settled,
)
from .settling import end_signal, fail, hold_exhausted, settle

logger = logging.getLogger("idempotency_django")

INTERRUPTED_MESSAGE: Final = (
    "The idempotency store cannot be reached, so the operation was interrupted. Retry later with "
    "the same key: the operation resumes."
)
HELD_MESSAGE: Final = (
    "The idempotency store cannot be reached, so the operation was interrupted. Its effects are "
    "unknown. It is not executed again until an operator completes or releases it."
)
PERSISTENCE: Final = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts to store the result of an executed operation."""


class LeasedRun:
    """One operation to run, by one attempt at most.

    Args:
        driver: calls what asks the store.
        store: where the operation's record lives.
        operation: the operation to execute.
        execute: executes it.
        lease: the operation's.
        recover: turns what the handler raised into a response, or raises it again.
        admit: raises to refuse a replay.
        together: whether the handler and the storing of its response are one transaction.
    """

    # Known from the claim on.
    claim: Claim
    lease: Lease
    execution: ExecutionContext

    def __init__(
        self,
        driver: Blocking | Awaiting,
        store: Store,
        operation: Operation,
        execute: Callable[[ExecutionContext], Awaitable[Result]],
        lease: timedelta,
        recover: Recover,
        admit: Admit | None,
        together: bool = False,
    ) -> None:
        self.driver = driver
        self.store = store
        self.operation = operation
        self.execute = execute
        self.seconds = lease.total_seconds()
        self.recover = recover
        self.admit = admit
        self.together = together
        self.begun = False  # the handler
        self.payload: Payload | None = None  # to be stored, of what the handler returned

    async def outcome(self) -> Outcome:
        """Run it, after waiting for another owner as long as the operation allows."""
        return await wait_until_settled(self.operation.wait, self._try_once, self.driver.pause)

    # Claim.

    async def _try_once(self) -> Outcome:
        outcome = await self.driver.call(self._claim)
        return await self._attempt() if outcome is None else outcome

    def _claim(self) -> Outcome | None:
        """Claim the operation, or return the outcome if it cannot be claimed."""
        store, operation, asked_at = self.store, self.operation, time.monotonic()
        try:
            known = store.recall(operation) if store.has_cache else None
            claim_or_record = known or acquire(store, operation)
        except OperationInProgress as error:
            return InProgress(busy=error.busy)
        if isinstance(claim_or_record, Claim):
            if claim_or_record.interrupted and hold_exhausted(store, claim_or_record):
                return Held()
            self.claim = claim_or_record
            self.lease = Lease(store, self.claim, self.seconds, asked_at)
            # Where a transaction holds all that the handler does, no attempt resumes another one.
            lease = None if self.together else self.lease
            self.execution = ExecutionContext(store, self.claim, lease)
            return None
        outcome = admitted(claim_or_record, operation, self.admit)
        if isinstance(outcome, Replayed) and not outcome.record.counted:
            store.record_replay(outcome.record, operation)
        return outcome

    # Run.

    async def _attempt(self) -> Outcome:
        """Run the handler and store its response, or record why there is none."""
        ended: Result | Exception
        try:
            return await self._executed()
        except RolledBack as rollback:
            ended = rollback.result
        except Exception as error:  # noqa: BLE001  # whatever it is, it goes on
            ended = error
        except asyncio.CancelledError as error:
            if not self.begun:  # else the key is free, or held, when the lease is over
                await self.driver.call(settle, self.claim, failure(error), self._recorded)
            raise
        # Outside the except clauses, so that an error raised on shows no trace of this detour.
        is_lost = isinstance(ended, ClaimLost) and not ended.foreign
        if is_lost and not await self.driver.call(self._try_to_renew):
            return await self._superseded()
        return await self.driver.call(self._ended, ended)

    async def _executed(self) -> Outcome:
        with kept_alive(self.lease):
            await self._announce(signals.claimed)
            with self.store.transaction() if self.together else nullcontext():
                if self.driver.cancelled:
                    raise self.driver.cancelled
                self.begun = True
                with entered(self.execution):
                    result = await self.execute(self.execution)
                if not isinstance(result.payload, Payload):
                    raise RolledBack(result)
                self.payload = result.payload
                if self.claim.attempt > 1:
                    await self.driver.call(self.execution.validate_all_called)
                if self.together:  # before any commit, so that a late owner commits nothing
                    await self.driver.call(self._complete, self.payload)
            is_stored = self.together or await self.driver.call(self._persist, self.payload)
        if not is_stored:
            return Executed(result.response)
        await self._announce(signals.completed, payload=self.payload)
        return Executed(result.response, self.payload)

    def _complete(self, payload: Payload) -> None:
        """Store the response of what was done.

        Raises:
            ClaimLost: the claim has another owner now.
        """
        if self.store.complete(self.claim, payload):
            return
        # An earlier call may have stored it, if its reply did not arrive.
        if not self._is_stored(payload, self._record()):
            raise ClaimLost

    def _persist(self, payload: Payload) -> bool:
        """Try :meth:`_complete` until it succeeds; ``False`` if the store stays out of reach."""
        for pause in (*PERSISTENCE, None):
            try:
                self._complete(payload)
            except (StoreUnavailable, OperationInProgress):
                if pause is None or self.lease.is_over:
                    logger.exception(
                        "%s was executed, but its result could not be stored. A retry of %s is %s "
                        "after the lease expires.",
                        self.operation.name,
                        self.operation.key,
                        "held" if self.operation.hold else "executed again",
                    )
                    return False
                time.sleep(pause)
            else:
                return True
        raise AssertionError

    async def _announce(self, signal: Signal, **arguments: object) -> None:
        """Send a signal. Its receivers may query the database, so no event loop waits for them."""
        if signal.has_listeners(Operation):
            await self.driver.call(announce, signal, self.claim, **arguments)

    # Settle.

    def _ended(self, ended: Result | Exception) -> Outcome:
        """Record the end of an attempt that did not complete, unless it is held; its outcome."""
        if isinstance(ended, Result):
            stored = settle(self.claim, ended, self._recorded)
            return Executed(ended.response, stored, ended)
        is_held = self._is_held(ended)
        if isinstance(ended, IdempotencyError) and not ended.foreign:
            ended = _interrupted(ended, is_held=is_held)
        result, stored = failure(ended), None
        try:
            result = self.recover(ended)
        finally:
            if not is_held:
                stored = settle(self.claim, result, self._recorded)
        return Executed(result.response, stored, result, ended)

    def _is_held(self, ended: Exception) -> bool:
        """Whether an operator must settle the attempt, because it is unknown what it committed."""
        is_away = isinstance(ended, StoreUnavailable) and self.begun and not ended.foreign
        # A response that cannot be stored is of effects that are committed.
        is_done = self.payload is not None and not self.together
        if not (self.operation.hold and (is_away or is_done)):
            return False
        try:
            return not self._is_stored(self.payload, self._record())
        except (StoreUnavailable, OperationInProgress):
            return True

    def _recorded(self, payload: Payload | None, result: Result) -> Signal | None:
        """Store the response, or else the failure, and return the signal to send.

        If a hook has failed after the commit, the response is stored already, and stays.
        """
        if payload is not None:
            recorded = self.store.complete(self.claim, payload)
        else:
            recorded = self._failed(result)
        if not recorded:
            record = self._record()
            if self._is_stored(self.payload, record):
                payload = self.payload
            elif payload is not None or not self._has_failed(record):
                return signals.lost
        if payload is None:
            return end_signal(result)
        announce(signals.completed, self.claim, payload=payload)
        return None

    def _failed(self, result: Result) -> bool:
        pinned = self.execution.pinned
        try:
            return fail(self.store, self.claim, result, pinned=pinned)
        except (StoreUnavailable, OperationInProgress):
            # The connection may have been lost while the handler ran; the store has a new one now.
            return fail(self.store, self.claim, result, pinned=pinned)

    def _record(self) -> Record | None:
        """The record as it is now."""
        return self.store.get(self.claim.key, self.claim.scope)

    def _is_stored(self, payload: Payload | None, record: Record | None) -> bool:
        """Whether the record holds this response of the attempt, with or without its body."""
        if payload is None or not self._is_of(record):
            return False
        return record.payload in {payload, replace(payload, body=None)}

    def _has_failed(self, record: Record | None) -> bool:
        """Whether the failure was recorded by an earlier call whose reply did not arrive."""
        return self._is_of(record) and (record.status is Status.FAILED or record.held)

    def _is_of(self, record: Record | None) -> TypeGuard[Record]:
        """Whether a record is the claimed one, and was not claimed again."""
        if record is None:
            return False
        mine = (self.claim.attempt, self.claim.record_id)
        return (record.attempt, record.record_id) == mine

    # Superseded.

    def _try_to_renew(self) -> bool:
        """Renew the lease once more. ``False``: another attempt has taken over."""
        try:
            return self.store.extend(self.claim, self.seconds)
        except (StoreUnavailable, OperationInProgress):
            return True

    async def _superseded(self) -> Outcome:
        """The outcome of a late owner, which is that of its successor.

        It waits for that as any other request does, but never executes a second time.
        """
        await self._announce(signals.lost)
        logger.warning(
            "Attempt %d of %s ended too late: its lease had expired, and another attempt took "
            "over.",
            self.claim.attempt,
            self.operation.name,
        )
        look = partial(self.driver.call, self._outcome_of_successor)
        # From now: its handler has taken longer than that.
        return await wait_until_settled(self.operation.wait, look, self.driver.pause)

    def _outcome_of_successor(self) -> Outcome:
        try:
            record = self._record()
        except StoreUnavailable as error:
            raise _interrupted(error) from error
        if record is None or record.status is Status.FAILED:
            raise ClaimLost
        return admitted(record, self.operation, self.admit)


def _interrupted(error: IdempotencyError, *, is_held: bool = False) -> IdempotencyError:
    """The error of an attempt that was begun: what it has done is not known."""
    if isinstance(error, StoreUnavailable):
        cause, error = error, StoreUnavailable(HELD_MESSAGE if is_held else INTERRUPTED_MESSAGE)
        error.__cause__, error.retryable = cause, not is_held
    error.state, error.safe_new_key = "unknown", False
    return error
