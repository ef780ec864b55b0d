"""The leased mode: the claim is there for all to see while its owner executes.

The flow is written once, as a generator that says what is to be done next; :func:`drive` does it,
:func:`adrive` awaits it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.db import Error as DatabaseFault
from django.dispatch import Signal

from .. import signals
from ..errors import ClaimLost, IdempotencyError, OperationInProgress, StoreUnavailable
from ..executions import Execution, Unprotected
from ..leases import Lease, kept_alive
from ..policy import Policy
from ..records import Claim, Operation, Payload, Record, Status
from ..stores import Store
from .outcomes import (
    Answer,
    Executed,
    InProgress,
    Outcome,
    Patience,
    Replayed,
    decide,
    failure,
    send,
)

logger = logging.getLogger("idempotency_django")

PERSISTENCE: Final = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts to store the answer of what has been done already."""


INTERRUPTED: Final = (
    "The idempotency store cannot be reached, so the operation was interrupted. Retry later with "
    "the same key: it goes on where it was."
)


# What is to be done next.


@dataclass(frozen=True, slots=True)
class Ask:
    """Call the store's method of that name."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Execute:
    """Run the handler."""

    execution: Execution


@dataclass(frozen=True, slots=True)
class Call:
    """Call a function that may ask the database."""

    function: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait; to the end, whatever is cancelled, where what was done must still be stored."""

    seconds: float
    to_the_end: bool = False


Wish = Ask | Execute | Call | Pause
Flow = Generator[Wish, Any, Outcome]
Recover = Callable[[Exception], Answer]


class _RolledBack(Exception):  # carries an answer out of a transaction; no error
    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.error)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Run:
    """One operation that is to be run.

    Attributes:
        store: where its record lives.
        policy: a resolved policy.
        operation: what is to be executed.
        lease: the operation's.
        recover: makes an answer of what the handler raised, or raises it on.
        outer: the transaction on the store's database to run the handler and store its answer in.
        inner: the transactions on other databases to run the handler in.
    """

    store: Store
    policy: Policy
    operation: Operation
    lease: timedelta
    recover: Recover
    outer: AbstractContextManager[object]
    inner: AbstractContextManager[object]

    def flow(self) -> Flow:
        """Run it, waiting for another owner as long as the policy says."""
        patience = Patience(self.policy)
        while True:
            outcome = yield from self._once(patience)
            if not isinstance(outcome, InProgress):
                return outcome
            pause = patience.pause()
            if pause is None:
                return outcome
            yield Pause(pause)

    def _once(self, patience: Patience) -> Flow:
        asked = time.monotonic()
        try:
            found = yield from self._found()
        except OperationInProgress:
            return InProgress()
        except StoreUnavailable as error:
            unavailable = error
        else:
            decision = decide(found, self.operation)
            if isinstance(decision, Replayed) and not decision.record.counted:
                yield Ask("record_replay", (decision.record, self.operation))
            if isinstance(decision, Claim):
                return (yield from self._attempt(decision, asked, patience))
            return decision
        return (yield from self._unprotected(unavailable))

    def _found(self) -> Generator[Wish, Any, Claim | Record]:
        known = None
        if self.store.recalls:
            known = yield Ask("recall", (self.operation,))
        return known or (yield Ask("acquire", (self.operation,)))  # type: ignore[no-any-return]

    def _unprotected(self, error: StoreUnavailable) -> Flow:
        if self.policy.on_store_error != "execute":
            raise error
        logger.error(
            "%s is executed WITHOUT protection, because its store cannot be reached and its policy "
            "says on_store_error='execute': a retry of %s executes it again.",
            self.operation.name,
            self.operation.key,
            exc_info=error,
        )
        try:
            answer = yield Execute(Unprotected(self.store, self.operation))
        except Exception as raised:  # noqa: BLE001  # the adapter makes an answer of it, or raises
            problem = raised
        else:
            return Executed(answer.response)
        answer = yield Call(partial(self.recover, problem))
        return Executed(answer.response)

    def _attempt(self, claim: Claim, asked: float, patience: Patience) -> Flow:
        lease = Lease(self.store, claim, self.lease.total_seconds(), asked)
        ended: Answer | Exception
        try:
            return (yield from self._execute(claim, lease))
        except _RolledBack as signal:
            ended = signal.answer
        except Exception as error:  # noqa: BLE001  # whatever it is, it goes on
            ended = error
        except GeneratorExit:
            raise
        except BaseException as exit_request:
            if not self.operation.hold:  # else a person decides, as after any other interruption
                yield from self._settle(claim, Answer(None, None, repr(exit_request), failed=True))
            raise
        # Outside the except clauses, so that an error raised on shows no trace of this detour.
        # Unless it was the claim of another operation, which the handler had executed.
        if isinstance(ended, ClaimLost) and not (yield from self._is_mine(claim)):
            return (yield from self._superseded(claim, patience))
        if isinstance(ended, StoreUnavailable):
            interrupted = StoreUnavailable(INTERRUPTED)
            interrupted.__cause__ = ended
            ended = interrupted
        if isinstance(ended, Exception):
            return (yield from self._recovered(claim, ended))
        yield from self._settle(claim, ended)
        return Executed(ended.response)

    def _is_mine(self, claim: Claim) -> Generator[Wish, Any, bool]:
        """Whether the claim is still its owner's, or nobody can say that it is not."""
        try:
            return (yield Ask("extend", (claim, self.lease.total_seconds())))  # type: ignore[no-any-return]
        except (StoreUnavailable, OperationInProgress):
            return True

    def _execute(self, claim: Claim, lease: Lease) -> Flow:
        execution = Execution(self.store, claim, lease)
        together = not isinstance(self.outer, nullcontext)
        stored = False
        with kept_alive(lease):
            yield from self._tell(signals.claimed, attempt=claim.attempt)
            with self.outer:
                with self.inner:
                    answer: Answer = yield Execute(execution)
                    if not isinstance(answer.payload, Payload):
                        raise _RolledBack(answer)
                    if claim.attempt > 1:
                        yield Call(execution.refuse_unreached_steps)
                    if together:  # before any of them commits, so that none does for a late owner
                        stored = yield from self._complete(claim, answer.payload, lease)
                if not together:  # after all of them have, or an answer could outlive its effects
                    stored = yield from self._complete(claim, answer.payload, lease)
        if stored:
            yield from self._announce_completed(claim, answer.payload)
        return Executed(answer.response)

    def _complete(self, claim: Claim, payload: Payload, lease: Lease) -> Generator[Wish, Any, bool]:
        """Store the answer of what has been done; ``False``: the store could not be reached.

        Raises:
            ClaimLost: the claim has another owner now.
        """
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
                if not isinstance(self.outer, nullcontext):
                    raise  # all of it rolls back
                if pause is None or lease.is_over:
                    logger.exception(
                        "%s was executed, but its answer could not be stored: a retry of %s is "
                        "executed again when its lease has ended.",
                        self.operation.name,
                        self.operation.key,
                    )
                    return False
            yield Pause(pause, to_the_end=True)
        raise AssertionError

    def _superseded(self, claim: Claim, patience: Patience) -> Flow:
        """The outcome of an owner that came too late: what its successor made of it.

        It may wait for that, as any other; but it does not execute a second time.
        """
        yield from self._tell(signals.lost, attempt=claim.attempt)
        logger.warning(
            "Attempt %d of %s came too late: its lease had ended and it was taken over.",
            claim.attempt,
            self.operation.name,
        )
        while True:
            found = yield Ask("get", (claim.key, claim.scope))
            if found is None or found.status is Status.FAILED:
                raise ClaimLost
            outcome = decide(found, self.operation)
            pause = patience.pause() if isinstance(outcome, InProgress) else None
            if pause is None:
                return outcome  # type: ignore[return-value]  # it is no claim
            yield Pause(pause)

    def _recovered(self, claim: Claim, error: Exception) -> Flow:
        answer = failure(error)
        try:
            answer = yield Call(partial(self.recover, error))
        finally:
            yield from self._settle(claim, answer)
        return Executed(answer.response)

    def _settle(self, claim: Claim, answer: Answer) -> Generator[Wish, Any, None]:
        """Write down how an attempt ended that did not complete."""
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
                    yield from self._announce_completed(claim, payload)
                    return
                signal = signals.lost
            elif not (yield from self._fail(claim, answer.error)):
                found = yield Ask("get", (claim.key, claim.scope))
                mine = found if found and found.attempt == claim.attempt else None
                if mine and mine.payload:  # what failed was a hook that ran after the commit
                    yield from self._announce_completed(claim, mine.payload)
                    return
                if mine is None or mine.status is not Status.FAILED:  # at the first try
                    signal = signals.lost
        except (IdempotencyError, DatabaseFault):
            logger.warning(
                "How attempt %d of %s ended could not be recorded (%s): its key is free when its "
                "lease has ended.",
                claim.attempt,
                self.operation.name,
                answer.error,
                exc_info=True,
            )
        reason = {} if signal is signals.lost else {"error": answer.error}
        yield from self._tell(signal, attempt=claim.attempt, **reason)
        if unmade is not None:
            raise unmade

    def _fail(self, claim: Claim, error: str) -> Generator[Wish, Any, bool]:
        try:
            return (yield Ask("fail", (claim, error)))  # type: ignore[no-any-return]
        except (StoreUnavailable, OperationInProgress):
            # The connection may have been lost while the handler ran; the store has a new one now.
            return (yield Ask("fail", (claim, error)))  # type: ignore[no-any-return]

    def _announce_completed(self, claim: Claim, payload: Payload) -> Generator[Wish, Any, None]:
        yield from self._tell(signals.completed, attempt=claim.attempt, payload=payload)

    def _tell(self, signal: Signal, **arguments: Any) -> Generator[Wish, Any, None]:
        """Send a signal. Its receivers may ask the database, which no event loop must wait for."""
        if signal.has_listeners(Operation):
            yield Call(partial(send, signal, self.operation, **arguments))


def _is_stored(claim: Claim, payload: Payload, found: Record) -> bool:
    """Whether a record holds the answer of this claim; a store may have left out its body."""
    kept = {payload, replace(payload, body=None)}
    return found.attempt == claim.attempt and found.payload in kept


def drive(run: Run, execute: Callable[[Execution], Answer]) -> Outcome:
    """Do what the flow wants, to its end."""
    flow = run.flow()
    advance: Callable[[], Wish] = partial(next, flow)
    while True:
        try:
            wish = advance()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        try:
            advance = partial(flow.send, _granted(run.store, wish, execute))
        except BaseException as error:  # noqa: BLE001  # it is the flow's to handle
            advance = partial(flow.throw, error)


def _granted(store: Store, wish: Wish, execute: Callable[[Execution], Answer]) -> Any:
    match wish:
        case Ask(method, arguments):
            return getattr(store, method)(*arguments)
        case Execute(execution):
            return execute(execution)
        case Call(function):
            return function()
        case Pause(seconds):
            return time.sleep(seconds)


async def adrive(run: Run, execute: Callable[[Execution], Awaitable[Answer]]) -> Outcome:
    """Await what the flow wants, to its end.

    A cancellation ends the handler, or keeps it from being begun, at once. What the store was asked
    is finished first: half-asked, a claim could be made that nobody knows of.
    """
    flow = run.flow()
    advance: Callable[[], Wish] = partial(next, flow)
    cancelled: list[asyncio.CancelledError] = []
    while True:
        try:
            wish = advance()
        except StopIteration as end:
            if cancelled:
                raise cancelled[0] from None
            return end.value  # type: ignore[no-any-return]
        except Exception:
            if cancelled:
                raise cancelled[0]  # noqa: B904  # the error is its context
            raise
        try:
            value = await _awaited(run.store, wish, execute, cancelled)
            advance = partial(flow.send, value)
        except BaseException as error:  # noqa: BLE001  # it is the flow's to handle
            advance = partial(flow.throw, error)


async def _awaited(
    store: Store,
    wish: Wish,
    execute: Callable[[Execution], Awaitable[Answer]],
    cancelled: list[asyncio.CancelledError],
) -> Any:
    match wish:
        case Ask(method, arguments):
            return await _finished(getattr(store, f"a{method}")(*arguments), cancelled)
        case Call(function):
            return await _finished(sync_to_async(function)(), cancelled)
        case Pause(seconds, to_the_end=True):
            return await _finished(asyncio.sleep(seconds), cancelled)
    if cancelled:
        raise cancelled.pop()
    match wish:
        case Execute(execution):
            return await execute(execution)
        case Pause(seconds):
            return await asyncio.sleep(seconds)


async def _finished(asked: Awaitable[Any], cancelled: list[asyncio.CancelledError]) -> Any:
    """The result of something that a cancellation must not tear apart."""
    task = asyncio.ensure_future(asked)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if not task.cancelled():
                cancelled.append(error)
        except BaseException:  # noqa: BLE001, S110  # it is in the task
            pass
    return task.result()
