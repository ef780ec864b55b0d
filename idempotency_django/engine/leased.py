"""The leased mode: the claim is visible to all while its owner executes.

The flow is a coroutine that is written once and awaits nothing but its driver. One driver blocks,
and never suspends; the other one awaits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, ParamSpec, TypeGuard, TypeVar

from asgiref.sync import sync_to_async
from django.db import Error as DatabaseFault
from django.dispatch import Signal

from .. import signals
from ..errors import ClaimLost, IdempotencyError, OperationInProgress, StoreUnavailable
from ..stores import Store
from ..stores.records import Claim, Operation, Payload, Record, Status
from .context import CURRENT, ExecutionContext
from .leases import Lease, kept_alive
from .outcomes import (
    Admit,
    ConflictWait,
    Executed,
    Expired,
    Held,
    Outcome,
    Recover,
    Replayed,
    Result,
    RolledBack,
    acquire,
    announce,
    decide,
    end_signal,
    fail,
    failure,
    hold_exhausted,
    in_progress,
    make_payload,
)
from .steps import describe_error

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

P = ParamSpec("P")
T = TypeVar("T")


class LeasedRun:
    """One operation to run, by one attempt at most.

    Args:
        driver: runs the handler, and calls the store.
        store: where the operation's record lives.
        operation: the operation to execute.
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
        driver: Driver,
        store: Store,
        operation: Operation,
        lease: timedelta,
        recover: Recover,
        admit: Admit | None,
        together: bool = False,
    ) -> None:
        self.driver = driver
        self.store = store
        self.operation = operation
        self.seconds = lease.total_seconds()
        self.recover = recover
        self.admit = admit
        self.together = together
        self.wait = ConflictWait(operation.wait)

    async def outcome(self) -> Outcome:
        """Run it, after waiting for another owner as long as the operation allows."""
        return await self.wait.wait_until_settled(self._try_once, self.driver.pause)

    async def _try_once(self) -> Outcome:
        asked_at = time.monotonic()
        try:
            claim_or_record = await self._acquire()
        except OperationInProgress as error:
            return await self.driver.call(in_progress, self.store, self.operation, error)
        if isinstance(claim_or_record, Claim):
            if claim_or_record.interrupted and await self.driver.call(
                hold_exhausted, self.store, claim_or_record
            ):
                return Held()
            # Of a late owner it may be the response of its successor.
            return await self._admitted(await self._attempted(claim_or_record, asked_at))
        outcome = await self._admitted(decide(claim_or_record, self.operation))
        if isinstance(outcome, Replayed) and not outcome.record.counted:
            await self.driver.call(self.store.record_replay, outcome.record, self.operation)
        return outcome

    async def _acquire(self) -> Claim | Record:
        if self.store.has_cache:
            known = await self.driver.call(self.store.recall, self.operation)
            if known is not None:
                return known
        return await self.driver.call(acquire, self.store, self.operation)

    async def _admitted(self, outcome: Outcome) -> Outcome:
        """The outcome, unless its caller may not know of it."""
        if self.admit is not None and isinstance(outcome, Replayed | Expired):
            await self.driver.call(self.admit, outcome.record)
        return outcome

    # Once it is claimed.

    async def _attempted(self, claim: Claim, asked_at: float) -> Outcome:
        """Run the handler and store its response, or record why not."""
        self.claim = claim
        self.lease = Lease(self.store, claim, self.seconds, asked_at)
        # Where a transaction holds all that the handler does, an attempt has no steps to resume.
        lease = None if self.together else self.lease
        self.execution = ExecutionContext(self.store, claim, lease)
        ended: Result | Exception
        try:
            return await self._executed()
        except RolledBack as signal:
            ended = signal.result
        except Exception as error:  # noqa: BLE001  # whatever it is, it goes on
            ended = error
        except GeneratorExit:
            raise
        except BaseException as exit_request:
            # Else a person decides, as after any other interruption.
            if not (self.operation.hold and self.driver.begun):
                await self._settle(Result(None, None, describe_error(exit_request), failed=True))
            raise
        # Outside the except clauses, so that an error raised on shows no trace of this detour.
        if isinstance(ended, IdempotencyError) and ended.foreign:
            return await self._recovered(ended, held=False)
        if isinstance(ended, ClaimLost) and not await self._is_mine():
            return await self._superseded()
        held = await self._is_held(ended)
        if isinstance(ended, StoreUnavailable):
            interrupted = StoreUnavailable(HELD_MESSAGE if held else INTERRUPTED_MESSAGE)
            interrupted.__cause__, interrupted.retryable = ended, not held
            ended = interrupted
        if isinstance(ended, IdempotencyError):  # raised after what, is not known
            ended.state, ended.safe_new_key = "unknown", False
        if isinstance(ended, Exception):
            return await self._recovered(ended, held=held)
        await self._settle(ended)
        return Executed(ended.response, None, ended)

    async def _executed(self) -> Outcome:
        stored = False
        with kept_alive(self.lease):
            await self._announce(signals.claimed)
            with self.store.transaction() if self.together else nullcontext():
                result = await self.driver.execute(self.execution)
                payload = result.payload
                if not isinstance(payload, Payload):
                    raise RolledBack(result)
                if self.claim.attempt > 1:
                    await self.driver.call(self.execution.validate_all_called)
                if self.together:  # before any commit, so that a late owner commits nothing
                    await self._complete(payload)
                    stored = True
            if not stored:
                stored = await self._complete_in_time(payload)
        if stored:
            await self._announce(signals.completed, payload=payload)
        return Executed(result.response, payload if stored else None)

    async def _complete(self, payload: Payload) -> None:
        """Store the response of what was done.

        Raises:
            ClaimLost: the claim has another owner now.
        """
        if await self.driver.call(self.store.complete, self.claim, payload):
            return
        # Unless it was stored at an earlier try, whose reply did not arrive.
        if not self._is_stored(payload, await self._record()):
            raise ClaimLost

    async def _complete_in_time(self, payload: Payload) -> bool:
        """:meth:`_complete`, as often as needed; ``False``: the store could not be reached."""
        for pause in (*PERSISTENCE, None):
            try:
                await self._complete(payload)
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
            else:
                return True
            await self.driver.pause(pause, to_the_end=True)
        raise AssertionError

    async def _is_mine(self) -> bool:
        """Whether the claim still belongs to its owner; true if the store is unreachable."""
        try:
            return await self.driver.call(self.store.extend, self.claim, self.seconds)
        except (StoreUnavailable, OperationInProgress):
            return True

    async def _is_held(self, ended: Result | Exception) -> bool:
        """Whether it is unknown what was committed, so that an operator must settle it."""
        is_unknown = self.driver.begun and isinstance(ended, StoreUnavailable)
        if not (self.operation.hold and is_unknown):
            return False
        payload = self.driver.payload
        if payload is None:
            return True
        try:
            return not self._is_stored(payload, await self._record())
        except (StoreUnavailable, OperationInProgress):
            return True

    async def _superseded(self) -> Outcome:
        """The outcome of a late owner: the outcome of its successor.

        It may wait for that, as any other request. But it does not execute a second time.
        """
        await self._announce(signals.lost)
        logger.warning(
            "Attempt %d of %s ended too late: its lease had expired, and another attempt took "
            "over.",
            self.claim.attempt,
            self.operation.name,
        )
        return await self.wait.wait_until_settled(self._successors, self.driver.pause)

    async def _successors(self) -> Outcome:
        record = await self._record()
        if record is None or record.status is Status.FAILED:
            raise ClaimLost
        return decide(record, self.operation)

    async def _recovered(self, error: Exception, *, held: bool) -> Outcome:
        result = failure(error)
        try:
            result = await self.driver.call(self.recover, error)
        finally:
            if not held:
                await self._settle(result)
        return Executed(result.response, None, result, error)

    async def _settle(self, result: Result) -> None:
        """Record that it did not complete, and why, or the response that is stored nevertheless.

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
                record = await self._record()
                if self._is_stored(self.driver.payload, record):
                    recorded, payload = True, self.driver.payload
                elif (
                    payload
                    or not self._is_of(record)
                    or not (record.status is Status.FAILED or record.held)
                ):
                    signal = signals.lost  # else it was recorded at the first try
            if recorded and payload:
                await self._announce(signals.completed, payload=payload)
                return
        except (IdempotencyError, DatabaseFault):
            logger.warning(
                "The end of attempt %d of %s could not be recorded (%s). Its key is %s after the "
                "lease expires.",
                self.claim.attempt,
                self.operation.name,
                result.error,
                "held" if self.operation.hold else "free",
                exc_info=True,
            )
        reason = {} if signal is signals.lost else {"error": result.error}
        await self._announce(signal, **reason)
        if unmade is not None:
            raise unmade

    async def _recorded(self, payload: Payload | None, result: Result) -> bool:
        if payload is not None:
            return await self.driver.call(self.store.complete, self.claim, payload)
        pinned = self.execution.pinned
        try:
            return await self.driver.call(fail, self.store, self.claim, result, pinned=pinned)
        except (StoreUnavailable, OperationInProgress):
            # The connection may have been lost while the handler ran; the store has a new one now.
            return await self.driver.call(fail, self.store, self.claim, result, pinned=pinned)

    async def _announce(self, signal: Signal, **arguments: Any) -> None:
        """Send a signal. Its receivers may query the database, so no event loop waits for them."""
        if signal.has_listeners(Operation):
            await self.driver.call(announce, signal, self.claim, **arguments)

    async def _record(self) -> Record | None:
        """The record as it is now."""
        return await self.driver.call(self.store.get, self.claim.key, self.claim.scope)

    def _is_stored(self, payload: Payload | None, record: Record | None) -> bool:
        """Whether a record has this response of the attempt; a store may have left out its body."""
        if payload is None or not self._is_of(record):
            return False
        return record.payload in {payload, replace(payload, body=None)}

    def _is_of(self, record: Record | None) -> TypeGuard[Record]:
        """Whether a record is the claimed one, and was not claimed again."""
        if record is None:
            return False
        mine = (self.claim.attempt, self.claim.record_id)
        return (record.attempt, record.record_id) == mine


class Driver(ABC):
    """Runs the handler of one flow, and its other blocking calls.

    Attributes:
        begun: whether the handler was begun.
        result: the handler's result; ``None``: none so far.
    """

    def __init__(self) -> None:
        self.begun = False
        self.result: Result | None = None

    @property
    def payload(self) -> Payload | None:
        """The part of the handler's result to store; ``None``: nothing, so far."""
        payload = self.result.payload if self.result else None
        return payload if isinstance(payload, Payload) else None

    @abstractmethod
    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that may ask a store or a database."""

    @abstractmethod
    async def execute(self, execution: ExecutionContext) -> Result:
        """Run the handler."""

    @abstractmethod
    async def pause(self, seconds: float, *, to_the_end: bool = False) -> None:
        """Wait; to the end, even after a cancellation, if what was done must still be stored."""


class Blocking(Driver):
    """Does everything at once, in the caller's thread.

    Args:
        handler: the handler.
    """

    def __init__(self, handler: Callable[[ExecutionContext], Result]) -> None:
        super().__init__()
        self._handler = handler

    def run(self, flow: Coroutine[Any, Any, T]) -> T:
        """The result of a flow, which never suspends."""
        try:
            flow.send(None)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        raise AssertionError

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    async def execute(self, execution: ExecutionContext) -> Result:
        self.begun = True
        token = CURRENT.set(execution)
        try:
            self.result = self._handler(execution)
        except (StopIteration, GeneratorExit) as error:
            raise _misused(error) from error
        finally:
            CURRENT.reset(token)
        return self.result

    async def pause(self, seconds: float, *, to_the_end: bool = False) -> None:
        time.sleep(seconds)


class Awaiting(Driver):
    """Leaves the event loop to others meanwhile; functions are called in a thread.

    A cancellation ends the handler at once, or prevents its start. A call of the store is finished
    first: otherwise it could make a claim without an owner.

    Args:
        handler: the handler, a coroutine function.
    """

    def __init__(self, handler: Callable[[ExecutionContext], Awaitable[Result]]) -> None:
        super().__init__()
        self._handler = handler
        self._cancellations: list[asyncio.CancelledError] = []

    async def run(self, flow: Coroutine[Any, Any, T]) -> T:
        """The result of a flow; a cancellation that it did not end with is raised after it."""
        try:
            result = await flow
        except Exception:
            if self._cancellations:
                raise self._cancellations[0]  # noqa: B904  # the error is its context
            raise
        if self._cancellations:
            raise self._cancellations[0]
        return result

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._finished(sync_to_async(function)(*args, **kwargs))

    async def execute(self, execution: ExecutionContext) -> Result:
        self._end_if_cancelled()
        self.begun = True
        token, task = CURRENT.set(execution), asyncio.current_task()
        try:
            self.result = await self._handler(execution)
        except GeneratorExit as error:
            if not _is_running(task):  # the coroutine is being closed, and may await no more
                raise
            raise _misused(error) from error
        finally:
            with suppress(ValueError):  # it is being closed in another context, which has no token
                CURRENT.reset(token)
        return self.result

    async def pause(self, seconds: float, *, to_the_end: bool = False) -> None:
        if to_the_end:
            await self._finished(asyncio.sleep(seconds))
            return
        self._end_if_cancelled()
        await asyncio.sleep(seconds)

    def _end_if_cancelled(self) -> None:
        if self._cancellations:
            raise self._cancellations.pop()

    async def _finished(self, work: Awaitable[T]) -> T:
        """The result of something that a cancellation must not interrupt."""
        task = asyncio.ensure_future(work)
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                if not task.cancelled():
                    self._cancellations.append(error)
            except BaseException:  # noqa: BLE001, S110  # it is in the task
                pass
        return task.result()


def _misused(error: BaseException) -> RuntimeError:
    """The error of a handler that raised what a coroutine, such as a flow, must not raise."""
    return RuntimeError(
        f"The handler raised {type(error).__name__}, which Python reserves for iterators and "
        "generators. Raise another exception, or give next() a default."
    )


def _is_running(task: asyncio.Task[Any] | None) -> bool:
    """Whether this is the code of a task that the event loop runs now."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:
        return False  # no loop runs: the garbage collector has called
