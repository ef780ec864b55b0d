"""The transactional mode: claim, effect and answer are one transaction."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final

from django.db import Error as DatabaseFault
from django.db import InterfaceError, OperationalError, connections, transaction

from .. import signals
from ..errors import ClaimLost, IdempotencyError, OperationInProgress
from ..records import Claim, Operation, Payload, Record
from ..stores import Store
from .context import ExecutionContext
from .explaining import explained
from .outcomes import (
    Admit,
    ConflictWait,
    Executed,
    InProgress,
    Outcome,
    Replayed,
    Result,
    announce_end,
    decide,
    failure,
    send,
)

logger = logging.getLogger("idempotency_django")

Execute = Callable[[ExecutionContext], Result]
Recover = Callable[[Exception], Result]
Undo = Callable[[], object]
Waiting = Callable[[], AbstractContextManager[object]]

UNKNOWN: Final = (OperationalError, InterfaceError)
"""What COMMIT raises if nobody knows whether it was done."""

_ERRORS: Final = 400  # and above: the status of an answer that tells of no success


class _RolledBack(Exception):  # carries an answer out of a transaction; no error
    def __init__(
        self, done: _Done, answer: Result, error: Exception | None = None, *, marked: bool = False
    ) -> None:
        super().__init__(answer.error)
        self.done = done
        self.answer = answer
        self.error = error
        self.marked = marked  # for rollback, before this left the transaction


class _Refused(Exception):  # carries the reason out of a transaction
    def __init__(self, error: Exception, *, marked: bool) -> None:
        super().__init__()
        self.error = error
        self.marked = marked  # for rollback, before this left the transaction


def run(
    store: Store,
    operation: Operation,
    execute: Execute,
    recover: Recover,
    after: ExitStack | None,
    waiting: Waiting,
    undo: Undo,
    admit: Admit | None,
) -> Outcome:
    """Run an operation in a transaction; see :func:`idempotency_django.engine.run`."""
    wait = ConflictWait(operation.wait)
    while True:
        outcome = _run_once(store, operation, execute, recover, after, undo, admit)
        pause = wait.pause(outcome)
        if pause is None:
            return outcome
        with waiting():
            time.sleep(pause)


def _run_once(
    store: Store,
    operation: Operation,
    execute: Execute,
    recover: Recover,
    after: ExitStack | None,
    undo: Undo,
    admit: Admit | None,
) -> Outcome:
    known = store.recall(operation) if store.recalls else None
    if known is not None:
        recalled = decide(known, operation)
        if admit is not None and isinstance(recalled, Replayed):
            admit(recalled.record)
        return recalled  # type: ignore[return-value]  # it is no claim
    done: _Done | None = None
    try:
        with store.transaction(after=after):
            decision = decide(store.acquire(operation), operation)
            if isinstance(decision, Replayed):
                _replay(store, decision.record, operation, admit)
            if not isinstance(decision, Claim):
                return decision
            done = _execute(store, decision, execute, undo)
            if after is not None:
                after.push(done.ended)
            return Executed(done.response)
    except OperationInProgress as error:
        if after is not None or (done and done.committed):
            raise
        if done is None:
            return InProgress()
        rolled_back = _RolledBack(done, failure(error), error)  # refused at COMMIT
    except _RolledBack as signal:
        rolled_back = signal
    except _Refused as refused:
        if after is not None and not refused.marked:  # the caller's transaction is to be asked yet
            transaction.set_rollback(False, using=store.using)
        raise refused.error from None
    except IdempotencyError:
        raise
    except Exception as error:
        if done is None or done.committed:  # then it was raised by a hook
            raise
        rolled_back = _RolledBack(done, failure(error), error)
    # Outside the except clauses, so that an error raised on shows no trace of this detour.
    return Executed(_after_rollback(store, rolled_back, recover, after))


def _replay(store: Store, record: Record, operation: Operation, admit: Admit | None) -> None:
    """Count a replay, unless it is refused: a refusal rolls back what was already counted."""
    if admit is not None:
        try:
            admit(record)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is raised on outside
            raise _Refused(error, marked=_is_marked(store)) from None
    if not record.counted:
        store.record_replay(record, operation)


class _Done:
    """What was executed and is to be committed, which a deferred constraint may still prevent."""

    def __init__(self, store: Store, claim: Claim, undo: Undo) -> None:
        self.store = store
        self.claim = claim
        self.undo = undo
        self.execution = ExecutionContext(store, claim, None)
        self.response: Any = None
        self.payload: Payload | None = None
        self.committed = False

    def announce(self) -> None:
        """Called once it is committed, by itself or as a part of something larger."""
        self.committed = True
        if self.payload is not None:
            _announce(self.claim, self.payload)

    def ended(self, _: object, error: BaseException | None, __: object) -> None:
        """Called when a transaction ended that had begun before."""
        if isinstance(error, Exception) and not isinstance(error, UNKNOWN) and not self.committed:
            self.undo()
            _settle(self, failure(error))


def _execute(store: Store, claim: Claim, execute: Execute, undo: Undo) -> _Done:
    send(signals.claimed, claim.operation, attempt=claim.attempt)
    done = _Done(store, claim, undo)
    store.on_commit(done.announce)  # before the handler's own hooks: one may raise and end them all
    try:
        with store.unbroken(claim.operation.name):
            answer = _unless_marked(store, execute(done.execution))
        if isinstance(answer.payload, Payload):
            if not store.complete(claim, answer.payload):
                raise ClaimLost
            done.payload = answer.payload
    except Exception as error:  # noqa: BLE001  # whatever it is, it rolls back and goes on
        marked = _is_marked(store)
        error = explained(error, claim.operation.name, store.using)
        raise _RolledBack(done, failure(error), error, marked=marked) from None
    if not isinstance(answer.payload, Payload):
        raise _RolledBack(done, answer)
    done.response = answer.response
    return done


def _unless_marked(store: Store, answer: Result) -> Result:
    """The answer, which is not kept if the handler refuses and has marked its transaction.

    A success then fails, because its effects would not be there. An error that the handler
    swallowed marks the transaction as well.
    """
    payload = answer.payload
    if isinstance(payload, Payload) and payload.status >= _ERRORS and _is_marked(store):
        return replace(answer, payload=None, error="The transaction was marked for rollback.")
    return answer


def _is_marked(store: Store) -> bool:
    return store.using is not None and connections[store.using].needs_rollback


@contextmanager
def _open_to_queries(store: Store, rolled_back: _RolledBack) -> Iterator[None]:
    """Remove our mark while an error is turned into an answer: Django would not have set it yet."""
    if rolled_back.marked:
        yield
        return
    transaction.set_rollback(False, using=store.using)
    try:
        yield
    finally:
        transaction.set_rollback(True, using=store.using)


def _after_rollback(
    store: Store, rolled_back: _RolledBack, recover: Recover, after: ExitStack | None
) -> Any:
    answer = rolled_back.answer
    if after is None:
        rolled_back.done.undo()

    def settle() -> None:
        if after is not None:  # until now the caller's transaction showed what was done in it
            rolled_back.done.undo()
        _settle(rolled_back.done, answer)

    try:
        if rolled_back.error is not None:
            with nullcontext() if after is None else _open_to_queries(store, rolled_back):
                answer = recover(rolled_back.error)
    finally:
        if after is None:
            settle()
        else:
            after.callback(settle)
    return answer.response


def _settle(done: _Done, answer: Result) -> None:
    """Record the end of a rolled-back attempt, unless another attempt has begun meanwhile."""
    store, claim = done.store, done.claim
    payload, unmade = None, None
    if callable(answer.payload):
        try:
            payload = answer.payload()
        except Exception as error:  # noqa: BLE001  # raised below, when it is written down
            unmade, answer = error, failure(error)
    # Whoever has completed it meanwhile is not replayed here, so that nothing is to be counted.
    uncounted = replace(claim.operation, count_replays=False)
    try:
        with store.transaction():
            held = store.acquire(uncounted)
            # A record that is not claimed here is not ours, unless the handler has ended its
            # transaction unseen. Where that is to be held, it is left to a person.
            mine = held if isinstance(held, Claim) else None if claim.operation.hold else claim
            if mine and payload is not None and store.complete(mine, payload):
                store.on_commit(partial(_announce, mine, payload))
                return
            if mine and payload is None:
                store.fail(mine, answer.error, pinned=done.execution.pinned)
    except (IdempotencyError, DatabaseFault):
        # The key is free and the client gets its answer; only the audit misses an attempt.
        logger.warning(
            "The end of attempt %d of %s could not be recorded: %s",
            claim.attempt,
            claim.operation.name,
            answer.error,
            exc_info=True,
        )
    announce_end(claim, answer)
    if unmade is not None:
        raise unmade


def _announce(claim: Claim, payload: Payload) -> None:
    send(signals.completed, claim.operation, attempt=claim.attempt, payload=payload)
