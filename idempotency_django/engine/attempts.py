"""One attempt of a leased operation, from the claim to whatever it ends in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from django.db import Error as DatabaseFault
from django.dispatch import Signal

from .. import signals
from ..errors import ClaimLost, IdempotencyError, OperationInProgress, StoreUnavailable
from ..executions import Execution
from ..leases import Lease, kept_alive
from ..records import Claim, Operation, Payload, Record, Status
from .outcomes import Answer, Executed, InProgress, Patience, decide, failure, send
from .wishes import Ask, Call, Execute, Flow, Pause, Wish

logger = logging.getLogger("idempotency_django")

PERSISTENCE: Final = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts to store the answer of what has been done already."""

INTERRUPTED: Final = (
    "The idempotency store cannot be reached, so the operation was interrupted. Retry later with "
    "the same key: it goes on where it was."
)

Recover = Callable[[Exception], Answer]


class _RolledBack(Exception):  # carries an answer out of a transaction; no error
    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.error)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at an operation.

    Attributes:
        lease: what it is made under; it knows the claim and the store.
        recover: makes an answer of what the handler raised, or raises it on.
        outer: the transaction on the store's database to run the handler and store its answer in.
        inner: the transactions on other databases to run the handler in.
        patience: how long to wait for a successor, where there is one.
    """

    lease: Lease
    recover: Recover
    outer: AbstractContextManager[object]
    inner: AbstractContextManager[object]
    patience: Patience

    @property
    def _claim(self) -> Claim:
        return self.lease.claim

    @property
    def _operation(self) -> Operation:
        return self.lease.claim.operation

    @property
    def _together(self) -> bool:
        """Whether the handler and its answer share a transaction."""
        return not isinstance(self.outer, nullcontext)

    def flow(self) -> Flow:
        """Run the handler and store its answer, or write down why not."""
        ended: Answer | Exception
        try:
            return (yield from self._execute())
        except _RolledBack as signal:
            ended = signal.answer
        except Exception as error:  # noqa: BLE001  # whatever it is, it goes on
            ended = error
        except GeneratorExit:
            raise
        except BaseException as exit_request:
            if not self._operation.hold:  # else a person decides, as after any other interruption
                yield from self._settle(Answer(None, None, repr(exit_request), failed=True))
            raise
        # Outside the except clauses, so that an error raised on shows no trace of this detour.
        # Unless it was the claim of another operation, which the handler had executed.
        if isinstance(ended, ClaimLost) and not (yield from self._is_mine()):
            return (yield from self._superseded())
        if isinstance(ended, StoreUnavailable):
            interrupted = StoreUnavailable(INTERRUPTED)
            interrupted.__cause__ = ended
            ended = interrupted
        if isinstance(ended, Exception):
            return (yield from self._recovered(ended))
        yield from self._settle(ended)
        return Executed(ended.response)

    def _is_mine(self) -> Generator[Wish, Any, bool]:
        """Whether the claim is still its owner's, or nobody can say that it is not."""
        try:
            return (yield Ask("extend", (self._claim, self.lease.seconds)))  # type: ignore[no-any-return]
        except (StoreUnavailable, OperationInProgress):
            return True

    def _execute(self) -> Flow:
        execution = Execution(self.lease.store, self._claim, self.lease)
        stored = False
        with kept_alive(self.lease):
            yield from self._tell(signals.claimed)
            with self.outer:
                with self.inner:
                    answer: Answer = yield Execute(execution)
                    if not isinstance(answer.payload, Payload):
                        raise _RolledBack(answer)
                    if self._claim.attempt > 1:
                        yield Call(execution.refuse_unreached_steps)
                    if self._together:  # before any commits, so that none does for a late owner
                        stored = yield from self._complete(answer.payload)
                if not self._together:  # after all have, or an answer could outlive its effects
                    stored = yield from self._complete(answer.payload)
        if stored:
            yield from self._tell(signals.completed, payload=answer.payload)
        return Executed(answer.response)

    def _complete(self, payload: Payload) -> Generator[Wish, Any, bool]:
        """Store the answer of what has been done; ``False``: the store could not be reached.

        Raises:
            ClaimLost: the claim has another owner now.
        """
        claim = self._claim
        for pause in (*PERSISTENCE, None):
            try:
                if (yield Ask("complete", (claim, payload))):
                    return True
                # Unless it was stored at an earlier try, whose answer did not arrive.
                found = yield Ask("get", (claim.key, claim.scope))
                if found and _is_stored(claim, payload, found):
                    return True
                raise ClaimLost
            except (StoreUnavailable, OperationInProgress):
                if self._together:
                    raise  # all of it rolls back
                if pause is None or self.lease.is_over:
                    logger.exception(
                        "%s was executed, but its answer could not be stored: a retry of %s is "
                        "executed again when its lease has ended.",
                        self._operation.name,
                        self._operation.key,
                    )
                    return False
            yield Pause(pause, to_the_end=True)
        raise AssertionError

    def _superseded(self) -> Flow:
        """The outcome of an owner that came too late: what its successor made of it.

        It may wait for that, as any other; but it does not execute a second time.
        """
        yield from self._tell(signals.lost)
        logger.warning(
            "Attempt %d of %s came too late: its lease had ended and it was taken over.",
            self._claim.attempt,
            self._operation.name,
        )
        while True:
            found = yield Ask("get", (self._claim.key, self._claim.scope))
            if found is None or found.status is Status.FAILED:
                raise ClaimLost
            outcome = decide(found, self._operation)
            pause = self.patience.pause() if isinstance(outcome, InProgress) else None
            if pause is None:
                return outcome  # type: ignore[return-value]  # it is no claim
            yield Pause(pause)

    def _recovered(self, error: Exception) -> Flow:
        answer = failure(error)
        try:
            answer = yield Call(partial(self.recover, error))
        finally:
            yield from self._settle(answer)
        return Executed(answer.response)

    def _settle(self, answer: Answer) -> Generator[Wish, Any, None]:
        """Write down how an attempt ended that did not complete."""
        claim = self._claim
        payload, unmade = None, None
        if callable(answer.payload):
            try:
                payload = yield Call(answer.payload)
            except Exception as error:  # noqa: BLE001  # raised below, when the key is free
                unmade, answer = error, failure(error)
        signal = signals.failed if answer.failed else signals.released
        try:
            if payload is not None:
                if (yield Ask("complete", (claim, payload))):
                    yield from self._tell(signals.completed, payload=payload)
                    return
                signal = signals.lost
            elif not (yield from self._fail(answer.error)):
                found = yield Ask("get", (claim.key, claim.scope))
                mine = found if found and found.attempt == claim.attempt else None
                if mine and mine.payload:  # what failed was a hook that ran after the commit
                    yield from self._tell(signals.completed, payload=mine.payload)
                    return
                if mine is None or mine.status is not Status.FAILED:  # at the first try
                    signal = signals.lost
        except (IdempotencyError, DatabaseFault):
            logger.warning(
                "How attempt %d of %s ended could not be recorded (%s): its key is free when its "
                "lease has ended.",
                claim.attempt,
                self._operation.name,
                answer.error,
                exc_info=True,
            )
        reason = {} if signal is signals.lost else {"error": answer.error}
        yield from self._tell(signal, **reason)
        if unmade is not None:
            raise unmade

    def _fail(self, error: str) -> Generator[Wish, Any, bool]:
        try:
            return (yield Ask("fail", (self._claim, error)))  # type: ignore[no-any-return]
        except (StoreUnavailable, OperationInProgress):
            # The connection may have been lost while the handler ran; the store has a new one now.
            return (yield Ask("fail", (self._claim, error)))  # type: ignore[no-any-return]

    def _tell(self, signal: Signal, **arguments: Any) -> Generator[Wish, Any, None]:
        """Send a signal. Its receivers may ask the database, which no event loop must wait for."""
        if signal.has_listeners(Operation):
            told = {"attempt": self._claim.attempt, **arguments}
            yield Call(partial(send, signal, self._operation, **told))


def _is_stored(claim: Claim, payload: Payload, found: Record) -> bool:
    """Whether a record holds the answer of this claim; a store may have left out its body."""
    kept = {payload, replace(payload, body=None)}
    return found.attempt == claim.attempt and found.payload in kept
