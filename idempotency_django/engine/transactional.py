"""The transactional mode: claim, effect and response are one transaction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, connections, transaction
from django.dispatch import Signal

from .. import signals
from ..errors import (
    ROLLED_BACK_MESSAGE,
    ClaimLost,
    IdempotencyError,
    OperationInProgress,
    StoreUnavailable,
)
from ..stores import Store
from ..stores.records import Claim, Operation, Payload, Record, Status
from ..stores.transactions import IN_NINJA
from .context import CURRENT, ExecutionContext, is_executing
from .flows import Blocking, finish
from .outcomes import (
    Admit,
    Executed,
    Expired,
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
    decide,
    failure,
    text_of,
    wait_until_settled,
)
from .settling import end_signal, fail, hold_exhausted, settle

Execute = Callable[[ExecutionContext], Result]

_DURABLE: Final = "A durable atomic block cannot be nested"
_ERRORS: Final = 400  # and above: the status of a response that tells of no success


class _ReplayRefused(Exception):  # carries the reason out of a transaction
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class TransactionalRun:
    """One operation to run, by one attempt at most.

    Its effects are committed at the end, which a deferred constraint may still prevent. Within a
    transaction of the caller's it is a savepoint: all of it commits with that one, or vanishes.

    Args:
        store: where the operation's record lives.
        operation: the operation to execute.
        execute: executes it.
        recover: turns what the handler raised into a response, or raises it again.
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
        admit: Admit | None,
    ) -> None:
        self.store = store
        self.operation = operation
        self.execute = execute
        self.recover = recover
        self.admit = admit
        self._claimed = False
        self._payload: Payload | None = None
        self._error: Exception | None = None  # the error that rolled it back

    def outcome(self, longest: timedelta) -> Outcome:
        """Run it, after waiting that long at most for another owner.

        A transaction of the caller's stays open meanwhile, with its locks.
        """

        async def look() -> Outcome:
            return self.try_once()

        return finish(wait_until_settled(longest, look, Blocking().pause))

    def try_once(self) -> Outcome:
        """Run it, unless another attempt is at it."""
        known = self.store.recall(self.operation) if self.store.has_cache else None
        if known is not None:
            return admitted(known, self.operation, self.admit)
        if is_executing(self.store, self.operation):
            return InProgress()
        try:
            with self.store.transaction():
                claim_or_record = acquire(self.store, self.operation)
                if isinstance(claim_or_record, Claim):
                    if claim_or_record.interrupted and hold_exhausted(self.store, claim_or_record):
                        return Held()
                    result = self._executed(claim_or_record)
                    self._complete(result)
                    return Executed(result.response, self._payload)
                outcome = decide(claim_or_record, self.operation)
                if isinstance(outcome, Replayed | Expired):
                    self._replay(outcome.record)
                return outcome
        except (OperationInProgress, ClaimLost) as error:
            if not self._claimed:
                if isinstance(error, ClaimLost):
                    raise
                return InProgress(busy=error.busy)
            self._note_rollback(error)
            self._error, result = error, failure(error)  # refused at COMMIT
        except RolledBack as signal:
            result = signal.result
        except _ReplayRefused as refused:
            raise refused.error from None
        except IdempotencyError as error:
            if not (self._claimed and isinstance(error, StoreUnavailable) and error.rolled_back):
                raise
            result = self._diagnosed(error)
        except Exception as error:
            if not self._claimed:
                raise
            self._error, result = error, failure(error)
        # Outside the except clauses, so that an error raised on shows no trace of this detour.
        return self._after_rollback(result)

    def _replay(self, record: Record) -> None:
        """Count a replay, unless it is refused: a refusal rolls back what was already counted."""
        if self.admit is not None:
            try:
                self.admit(record)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is raised on outside
                raise _ReplayRefused(error) from None
        if not (record.counted or record.expired):
            self.store.record_replay(record, self.operation, last=True)

    # Once it is claimed.

    def _executed(self, claim: Claim) -> Result:
        """The result of the handler, if it must be stored.

        Raises:
            RolledBack: it is not.
        """
        store = self.store
        if signals.claimed.receivers:
            announce(signals.claimed, claim)
        self.claim, self.execution = claim, ExecutionContext(store, claim, None)
        if signals.completed.receivers:
            # Before the handler's own hooks: one may raise and end them all.
            store.on_commit(self._announce)
        self._claimed = True
        token = CURRENT.set(self.execution)
        try:
            result = self.execute(self.execution)
        except Exception as error:  # noqa: BLE001  # whatever it is, it rolls back and goes on
            raise RolledBack(self._diagnosed(error)) from None
        finally:
            self.execution.is_over = True
            CURRENT.reset(token)
        if not isinstance(result.payload, Payload):
            raise RolledBack(result)
        return result

    def _complete(self, result: Result) -> None:
        """Store the response, which ends the transaction."""
        payload: Any = result.payload
        if payload.status >= _ERRORS and _is_marked(self.store):
            # An error is not kept if the handler has marked its transaction, or swallowed an
            # error that did. A success then fails, because its effects would not be there.
            marked = "The transaction was marked for rollback."
            raise RolledBack(replace(result, payload=None, error=marked))
        try:
            completed = self.store.complete(self.claim, payload, last=True)
        except Exception as error:
            is_known = isinstance(error, IdempotencyError) or _reason(error, self.store.using)
            if not is_known:  # it may be of the COMMIT
                raise
            raise RolledBack(self._diagnosed(error)) from None
        if not completed:
            raise ClaimLost
        self._payload = payload

    def _diagnosed(self, error: Exception) -> Result:
        self._error = _diagnose(error, self.operation.name, self.store.using)
        if isinstance(self._error, IdempotencyError):
            self._note_rollback(self._error)
        return failure(self._error)

    def _note_rollback(self, error: IdempotencyError) -> None:
        """Tell the client that the error took everything back, if no earlier attempt was made.

        An earlier attempt may have been leased, by the policy of that time. A new key is never
        safe: the handler may have called another service, and has if it is pinned.
        """
        if error.foreign or isinstance(error.__cause__, IntegrityError):
            return  # of the view, or because another request has completed the operation
        error.safe_new_key = False
        if self.execution.pinned:
            error.state = "unknown"
        elif self.claim.attempt == 1:
            error.state = "not-executed"

    def _announce(self) -> None:
        """Called once it is committed, alone or in an outer transaction."""
        if self._payload is not None:
            announce(signals.completed, self.claim, payload=self._payload)

    def _after_rollback(self, result: Result) -> Executed:
        """Record the end of the attempt, whose claim was rolled back with it; its outcome.

        Within a transaction of the caller's, the record lives or dies with that one.
        """
        try:
            if self._error is not None:
                with self._savepoint():
                    result = self.recover(self._error)
        finally:
            stored = settle(self.claim, result, self._recorded)
        return Executed(result.response, stored, result, self._error)

    def _savepoint(self) -> AbstractContextManager[None]:
        """Contain a rollback that the response to an error asks for, as REST framework's does.

        It is done already, up to the caller's transaction.
        """
        using = self.store.using
        joined = using is not None and connections[using].in_atomic_block
        return transaction.atomic(using=using) if joined else nullcontext()

    def _recorded(self, payload: Payload | None, result: Result) -> Signal | None:
        completed = not _is_marked(self.store) and self._record_end(payload, result)
        return None if completed else end_signal(result)

    def _record_end(self, payload: Payload | None, result: Result) -> bool:
        """Record a response, or else the failure; whether the operation is completed now.

        If a hook has raised after the commit, it was completed before.
        """
        store, claim = self.store, self.claim
        with store.transaction():
            claim_or_record = store.acquire(claim.operation)
            if isinstance(claim_or_record, Claim):
                mine: Claim | None = claim_or_record
            elif claim_or_record.status is Status.COMPLETED:
                return self._payload is not None  # else it is another request's
            else:
                # It is not ours, unless the handler has ended its transaction unseen. Where that
                # is to be held, it is left to a person.
                mine = claim if claim.record_id and not claim.operation.hold else None
            if mine and payload is not None and store.complete(mine, payload):
                store.on_commit(partial(announce, signals.completed, mine, payload=payload))
                return True
            if mine and payload is None:
                fail(store, mine, result, pinned=self.execution.pinned)
        return False


def _is_marked(store: Store) -> bool:
    """Whether the store's transaction is marked for rollback, and takes no statement any more."""
    if store.using is None or not connections[store.using].in_atomic_block:
        return False  # one that was closed within a transaction keeps the mark
    return connections[store.using].needs_rollback


def _diagnose(error: Exception, operation: str, using: str | None) -> Exception:
    """The error, or one that explains it if its cause is the transaction around the handler.

    Args:
        error: what the handler raised, or what followed from what it did.
        operation: the operation that it executes.
        using: the database of the transaction.
    """
    what = _reason(error, using)
    if not what:
        return _rolled_back(error) if isinstance(error, StoreUnavailable) else error
    better = ImproperlyConfigured(
        f"{what} within a transaction, and {operation} runs in one: its idempotency policy is "
        "transactional, so that its effects and its result commit together. Do that outside the "
        "view, or give its policy mode='leased'. Under ATOMIC_REQUESTS, also mark the view with "
        f"transaction.non_atomic_requests. {IN_NINJA}"
    )
    better.__cause__ = error
    return better


def _rolled_back(error: StoreUnavailable) -> StoreUnavailable:
    """The error, which does not say any more that nothing was executed."""
    if error.foreign or error.detail != error.default_detail:
        return error
    better = StoreUnavailable(ROLLED_BACK_MESSAGE)
    better.rolled_back, better.__cause__ = True, error
    return better


def _reason(error: Exception, using: str | None) -> str:
    """The mistake of the handler; empty if the transaction around it is not the cause."""
    if using is not None and connections[using].closed_in_transaction:
        return "The connection was closed (by close_old_connections()?), which cannot be done"
    if isinstance(error, RuntimeError) and _DURABLE in text_of(error):
        return "transaction.atomic(durable=True) cannot be used"
    return ""
