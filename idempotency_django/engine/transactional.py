"""The transactional mode: claim, effect and answer are one transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from django.db import connections, transaction

from .. import signals
from ..errors import ClaimLost, IdempotencyError, OperationInProgress, StoreUnavailable
from ..records import Claim, Operation, Payload, Record
from ..stores import Store
from .context import CURRENT, ExecutionContext
from .outcomes import (
    UNCERTAIN_ERRORS,
    Admit,
    ConflictWait,
    Executed,
    Held,
    Outcome,
    Recover,
    Replayed,
    Result,
    RolledBack,
    announce,
    decide,
    diagnose,
    failure,
    hold_exhausted,
    in_progress,
    refusal,
    settle_rolled_back,
)


class Atomic:
    """The transactions that a caller wants around the handler; this one wants none.

    In the transactional mode the claim is made inside them. In the leased mode it is committed
    before them; the handler and its answer share the one on the store's database.
    """

    def around_claim(self, store: Store) -> ExitStack | None:
        """Keep the transactions open around a claim without a lease.

        Returns:
            The callbacks to run when the store's transaction has ended, which is for the caller
            to do, with the error if it was rolled back. ``None``: the store opens its own.
        """
        return None

    def suspended(self) -> AbstractContextManager[object]:
        """End the transactions for the length of the block, so that who waits in it holds nothing.

        The same transactions begin again after it.
        """
        return nullcontext()

    def around_handler(self, store: Store) -> AbstractContextManager[bool]:
        """End the transactions, so that a claim with a lease can be committed.

        Returns:
            The same transactions, to be begun later around the handler. In the block, ``True``
            says that one is on the store's database, so that the answer is stored in the block.
        """
        return nullcontext(False)


Execute = Callable[[ExecutionContext], Result]

_ERRORS: Final = 400  # and above: the status of an answer that tells of no success


class _Refused(Exception):  # carries the reason out of a transaction
    def __init__(self, error: Exception, *, marked: bool) -> None:
        super().__init__()
        self.error = error
        self.marked = marked  # for rollback, before this left the transaction


class TransactionalRun:
    """One operation that is to be run, by one attempt at most.

    What it does is to be committed, which a deferred constraint may still prevent.

    Args:
        store: where the operation's record lives.
        operation: what is to be executed.
        execute: executes it.
        recover: turns what the handler raised into an answer, or raises it again.
        atomic: the caller's transactions, in which the claim is made; ``None``: there are none.
        undo: takes back what no database knows of.
        admit: raises to refuse a replay.
    """

    # Known from the claim on.
    claim: Claim
    execution: ExecutionContext

    def __init__(
        self,
        store: Store,
        operation: Operation,
        execute: Execute,
        recover: Recover,
        atomic: Atomic | None,
        undo: Callable[[], object],
        admit: Admit | None,
    ) -> None:
        self.store = store
        self.operation = operation
        self.execute = execute
        self.recover = recover
        self.atomic = atomic
        self.after = None if atomic is None else atomic.around_claim(store)
        self.undo = undo
        self.admit = admit
        self._claimed = False
        self._committed = False
        self._payload: Payload | None = None
        self._error: Exception | None = None  # what rolled it back
        self._marked = False  # for rollback, before the error left the transaction

    def outcome(self, longest: timedelta) -> Outcome:
        """Run it, after waiting that long at most for another owner."""
        wait = ConflictWait(longest)
        while True:
            outcome = self.try_once()
            pause = wait.pause(outcome)
            if pause is None:
                return outcome
            with self.atomic.suspended() if self.atomic else nullcontext():
                time.sleep(pause)

    def try_once(self) -> Outcome:
        """Run it, unless somebody else is at it."""
        known = self.store.recall(self.operation) if self.store.recalls else None
        if known is not None:
            recalled = decide(known, self.operation)
            if self.admit is not None and isinstance(recalled, Replayed):
                self.admit(recalled.record)
            return recalled
        try:
            with self.store.transaction(after=self.after):
                claim_or_record = self.store.acquire(self.operation)
                if isinstance(claim_or_record, Claim):
                    if claim_or_record.interrupted and hold_exhausted(self.store, claim_or_record):
                        return Held()
                    return Executed(self._executed(claim_or_record))
                outcome = decide(claim_or_record, self.operation)
                if isinstance(outcome, Replayed):
                    self._replay(outcome.record)
                return outcome
        except (OperationInProgress, ClaimLost) as error:
            if not self._claimed and isinstance(error, OperationInProgress):
                outcome = in_progress(self.store, self.operation, error)
                if self.after is None:
                    return outcome
                if outcome.busy:
                    raise refusal(outcome) from error
            if self.after is not None or self._committed:
                raise
            self._error, result = error, failure(error)  # refused at COMMIT
        except RolledBack as signal:
            result = signal.result
        except _Refused as refused:
            if self.after is not None and not refused.marked:  # it is to be asked yet
                transaction.set_rollback(False, using=self.store.using)
            raise refused.error from None
        except IdempotencyError as error:
            if not (self._claimed and isinstance(error, StoreUnavailable) and error.rolled_back):
                raise
            result = self._diagnosed(error)
        except Exception as error:
            if not self._claimed or self._committed:  # then it was raised by a hook
                raise
            self._error, result = error, failure(error)
        # Outside the except clauses, so that an error raised on shows no trace of this detour.
        result = self._after_rollback(result)
        return Executed(result.response, result, self._error)

    def _replay(self, record: Record) -> None:
        """Count a replay, unless it is refused: a refusal rolls back what was already counted."""
        if self.admit is not None:
            try:
                self.admit(record)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is raised on outside
                raise _Refused(error, marked=self._is_marked()) from None
        if not record.counted:
            self.store.record_replay(record, self.operation)

    # Once it is claimed.

    def _executed(self, claim: Claim) -> Any:
        """The response of the handler, whose answer is stored."""
        store = self.store
        if signals.claimed.receivers:
            announce(signals.claimed, claim)
        self.claim, self.execution = claim, ExecutionContext(store, claim, None)
        # Before the handler's own hooks: one may raise and end them all.
        store.on_commit(self._announce)
        self._claimed = True
        token = CURRENT.set(self.execution)
        try:
            with store.guard_transaction(claim.operation.name):
                result = self.execute(self.execution)
            payload = result.payload
            if isinstance(payload, Payload) and payload.status >= _ERRORS and self._is_marked():
                # An error is not kept if the handler has marked its transaction, or swallowed an
                # error that did. A success then fails, because its effects would not be there.
                marked = "The transaction was marked for rollback."
                result = replace(result, payload=None, error=marked)
            elif isinstance(payload, Payload):
                if not store.complete(claim, payload):
                    raise ClaimLost
                self._payload = payload
        except Exception as error:  # noqa: BLE001  # whatever it is, it rolls back and goes on
            self._marked = self._is_marked()
            raise RolledBack(self._diagnosed(error)) from None
        finally:
            CURRENT.reset(token)
        if self._payload is None:
            raise RolledBack(result)
        if self.after is not None:
            self.after.push(self._ended)
        return result.response

    def _diagnosed(self, error: Exception) -> Result:
        if self.store.has_ended(error):
            ended = StoreUnavailable()
            ended.__cause__, error = error, ended
        self._error = diagnose(error, self.operation.name, self.store.using)
        return failure(self._error)

    def _is_marked(self) -> bool:
        using = self.store.using
        return using is not None and connections[using].needs_rollback

    def _announce(self) -> None:
        """Called once it is committed, by itself or as a part of something larger."""
        self._committed = True
        if self._payload is not None and signals.completed.receivers:
            announce(signals.completed, self.claim, payload=self._payload)

    def _ended(self, _: object, error: BaseException | None, __: object) -> None:
        """Called when the caller's transaction has ended."""
        if self._committed or isinstance(error, UNCERTAIN_ERRORS):
            return
        if isinstance(error, Exception):
            self._settle_later(failure(error))

    def _after_rollback(self, result: Result) -> Result:
        """The result of what was rolled back, or is to be with the caller's transaction."""
        if self.after is not None:
            try:
                if self._error is not None:
                    with self._open_to_queries():
                        result = self.recover(self._error)
            finally:
                # Until then the caller's transaction shows what was done in it.
                self.after.callback(self._settle_later, result)
            return result
        self.undo()
        try:
            if self._error is not None:
                result = self.recover(self._error)
        finally:
            self._settle(result)
        return result

    @contextmanager
    def _open_to_queries(self) -> Iterator[None]:
        """Remove our mark while an error is turned into an answer: Django has not set it yet."""
        if self._marked:
            yield
            return
        transaction.set_rollback(False, using=self.store.using)
        try:
            yield
        finally:
            transaction.set_rollback(True, using=self.store.using)

    def _settle_later(self, result: Result) -> None:
        self.undo()
        self._settle(result)

    def _settle(self, result: Result) -> None:
        settle_rolled_back(self.store, self.claim, result, pinned=self.execution.pinned)
