"""The leased mode: the claim is visible to all while its owner executes."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from ..errors import OperationInProgress, StoreUnavailable
from ..records import Claim, Operation, Payload, Record
from ..stores import Store
from .attempts import Attempt, Recover
from .context import ExecutionContext, Unprotected
from .drivers import Ask, Call, Execute, Flow, Pause, RolledBack, Wish
from .leases import Lease
from .outcomes import Admit, ConflictWait, Executed, InProgress, Outcome, Replayed, decide

logger = logging.getLogger("idempotency_django")


@dataclass(frozen=True, slots=True)
class Run:
    """One operation that is to be run.

    Attributes:
        store: where its record lives.
        operation: what is to be executed.
        lease: the operation's.
        recover: turns what the handler raised into an answer, or raises it again.
        outer: the transaction on the store's database to run the handler and store its answer in.
        inner: the transactions on other databases to run the handler in.
        admit: raises to refuse a replay.
    """

    store: Store
    operation: Operation
    lease: timedelta
    recover: Recover
    outer: AbstractContextManager[object]
    inner: AbstractContextManager[object]
    admit: Admit | None

    def flow(self) -> Flow:
        """Run it, after waiting for another owner as long as the operation allows."""
        wait = ConflictWait(self.operation.wait)
        while True:
            outcome = yield from self._once(wait)
            pause = wait.pause(outcome)
            if pause is None:
                return outcome
            yield Pause(pause)

    def _once(self, wait: ConflictWait) -> Flow:
        asked = time.monotonic()
        try:
            found = yield from self._found()
        except OperationInProgress:
            return InProgress()
        except StoreUnavailable as error:
            unavailable = error
        else:
            decision = decide(found, self.operation)
            yield from self._admitted(decision)
            if isinstance(decision, Replayed) and not decision.record.counted:
                yield Ask("record_replay", (decision.record, self.operation))
            if isinstance(decision, Claim):
                lease = Lease(self.store, decision, self.lease.total_seconds(), asked)
                work = Execute(ExecutionContext(self.store, decision, lease))
                attempt = Attempt(lease, work, self.recover, self.outer, self.inner, wait)
                outcome = yield from attempt.flow()
                yield from self._admitted(outcome)  # a late owner's, whose successor completed it
                return outcome
            return decision
        return (yield from self._unprotected(unavailable))

    def _admitted(self, decision: Claim | Outcome) -> Generator[Wish, Any, None]:
        """Continue, unless the decision is a replay that is refused."""
        if self.admit is not None and isinstance(decision, Replayed):
            yield Call(partial(self.admit, decision.record))

    def _found(self) -> Generator[Wish, Any, Claim | Record]:
        known = None
        if self.store.recalls:
            known = yield Ask("recall", (self.operation,))
        return known or (yield Ask("acquire", (self.operation,)))  # type: ignore[no-any-return]

    def _unprotected(self, error: StoreUnavailable) -> Flow:
        if not self.operation.execute_without_store:
            raise error
        problem: Exception | None = None
        try:
            # Where the outer one is on the very database that cannot be reached, nothing is run.
            with self.outer, self.inner:
                logger.error(
                    "%s is executed WITHOUT protection, because its store cannot be reached and "
                    "its policy has on_store_error='execute'. A retry of %s executes it again.",
                    self.operation.name,
                    self.operation.key,
                    exc_info=error,
                )
                answer = yield Execute(Unprotected(self.store, self.operation))
                if not isinstance(answer.payload, Payload):
                    raise RolledBack(answer)
        except RolledBack as signal:
            answer = signal.answer
        except Exception as raised:  # noqa: BLE001  # the adapter makes an answer of it, or raises
            problem = raised
        if problem is not None:
            answer = yield Call(partial(self.recover, problem))
        return Executed(answer.response)
