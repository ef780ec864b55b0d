"""One attempt of a leased operation, from the claim to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from django.db import InterfaceError, OperationalError

from .. import signals
from ..errors import ClaimLost, IdempotencyError, OperationInProgress, StoreUnavailable
from ..records import Claim, Operation, Payload, Status
from .drivers import Ask, Call, Execute, Flow, Pause, RolledBack, Wish
from .leases import Lease, kept_alive
from .outcomes import ConflictWait, Executed, Result, decide, failure
from .settling import is_stored, settle, tell

logger = logging.getLogger("idempotency_django")

PERSISTENCE: Final = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts to store the answer of what is already done."""

INTERRUPTED: Final = (
    "The idempotency store cannot be reached, so the operation was interrupted. Retry later with "
    "the same key: the operation resumes."
)

HELD: Final = (
    "The idempotency store cannot be reached, so the operation was interrupted. How much of it "
    "was done is unknown. It is not repeated until an operator settles it."
)

UNCONFIRMED: Final = (StoreUnavailable, OperationalError, InterfaceError)
"""What is raised after the handler if nobody knows whether its transactions committed."""

Recover = Callable[[Exception], Result]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at an operation.

    Attributes:
        lease: the attempt's lease; it knows the claim and the store.
        work: the handler, which runs once.
        recover: turns what the handler raised into an answer, or raises it again.
        outer: the transaction on the store's database to run the handler and store its answer in.
        inner: the transactions on other databases to run the handler in.
        wait: how long to wait for a successor, if there is one.
    """

    lease: Lease
    work: Execute
    recover: Recover
    outer: AbstractContextManager[object]
    inner: AbstractContextManager[object]
    wait: ConflictWait

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
        """Run the handler and store its answer, or record why not."""
        ended: Result | Exception
        try:
            return (yield from self._execute())
        except RolledBack as signal:
            ended = signal.answer
        except Exception as error:  # noqa: BLE001  # whatever it is, it goes on
            ended = error
        except GeneratorExit:
            raise
        except BaseException as exit_request:
            # Else a person decides, as after any other interruption.
            if not (self._operation.hold and self.work.begun):
                answer = Result(None, None, repr(exit_request), failed=True)
                yield from settle(self._claim, answer, self.work)
            raise
        # Outside the except clauses, so that an error raised on shows no trace of this detour.
        if isinstance(ended, IdempotencyError) and ended.foreign:
            return (yield from self._recovered(ended, held=False))
        if isinstance(ended, ClaimLost) and not (yield from self._is_mine()):
            return (yield from self._superseded())
        held = yield from self._is_held(ended)
        if isinstance(ended, StoreUnavailable):
            interrupted = StoreUnavailable(HELD if held else INTERRUPTED)
            interrupted.__cause__ = ended
            ended = interrupted
        if isinstance(ended, Exception):
            return (yield from self._recovered(ended, held=held))
        yield from settle(self._claim, ended, self.work)
        return Executed(ended.response)

    def _is_mine(self) -> Generator[Wish, Any, bool]:
        """Whether the claim is still its owner's, or nobody can say that it is not."""
        try:
            return (yield Ask("extend", (self._claim, self.lease.seconds)))  # type: ignore[no-any-return]
        except (StoreUnavailable, OperationInProgress):
            return True

    def _is_held(self, ended: Result | Exception) -> Generator[Wish, Any, bool]:
        """Whether nobody knows what was committed, so that an operator must settle it."""
        payload = self.work.payload
        unknown = UNCONFIRMED if payload else StoreUnavailable
        if not (self._operation.hold and self.work.begun and isinstance(ended, unknown)):
            return False
        if payload is None:
            return True
        try:
            found = yield Ask("get", (self._claim.key, self._claim.scope))
        except (StoreUnavailable, OperationInProgress):
            return True
        return not is_stored(self._claim, payload, found)

    def _execute(self) -> Flow:
        stored = False
        with kept_alive(self.lease):
            yield from tell(self._claim, signals.claimed)
            with self.outer:
                with self.inner:
                    answer: Result = yield self.work
                    if not isinstance(answer.payload, Payload):
                        raise RolledBack(answer)
                    if self._claim.attempt > 1:
                        yield Call(self.work.execution.refuse_unreached_steps)
                    if self._together:  # before any commits, so that none does for a late owner
                        stored = yield from self._complete(answer.payload)
                if not self._together:  # after all have, or an answer could outlive its effects
                    stored = yield from self._complete(answer.payload)
        if stored:
            yield from tell(self._claim, signals.completed, payload=answer.payload)
        return Executed(answer.response)

    def _complete(self, payload: Payload) -> Generator[Wish, Any, bool]:
        """Store the answer of what was done; ``False``: the store could not be reached.

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
                if is_stored(claim, payload, found):
                    return True
                raise ClaimLost
            except (StoreUnavailable, OperationInProgress):
                if self._together:
                    raise  # all of it rolls back
                if pause is None or self.lease.is_over:
                    logger.exception(
                        "%s was executed, but its answer could not be stored. A retry of %s is "
                        "%s after the lease expires.",
                        self._operation.name,
                        self._operation.key,
                        "held" if self._operation.hold else "executed again",
                    )
                    return False
            yield Pause(pause, to_the_end=True)
        raise AssertionError

    def _superseded(self) -> Flow:
        """The outcome of a late owner: the outcome of its successor.

        It may wait for that, as any other request. But it does not execute a second time.
        """
        yield from tell(self._claim, signals.lost)
        logger.warning(
            "Attempt %d of %s ended too late: its lease had expired and another attempt took over.",
            self._claim.attempt,
            self._operation.name,
        )
        while True:
            found = yield Ask("get", (self._claim.key, self._claim.scope))
            if found is None or found.status is Status.FAILED:
                raise ClaimLost
            outcome = decide(found, self._operation)
            pause = self.wait.pause(outcome)  # type: ignore[arg-type]  # it is no claim
            if pause is None:
                return outcome  # type: ignore[return-value]
            yield Pause(pause)

    def _recovered(self, error: Exception, *, held: bool) -> Flow:
        answer = failure(error)
        try:
            answer = yield Call(partial(self.recover, error))
        finally:
            if not held:
                yield from settle(self._claim, answer, self.work)
        return Executed(answer.response)
