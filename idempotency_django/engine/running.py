"""One operation, by one attempt at most: claim, execute, complete, or say why not.

:func:`run` and :func:`arun` know nothing of HTTP and no concrete store. An adapter gives them an
operation and a function that executes it, and matches the :data:`Outcome` they return.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from asgiref.sync import sync_to_async

from ..conf import conf
from ..stores import Store
from ..stores.records import Operation, Record
from .context import ExecutionContext
from .flows import Awaiting, Blocking, finish
from .leased import LeasedRun
from .outcomes import (
    Admit,
    Executed,
    Expired,
    Held,
    InProgress,
    Mismatched,
    Outcome,
    Recover,
    Replayed,
    Result,
    announce_outcome,
    decide,
    signal_of,
)
from .transactional import Execute, TransactionalRun

# The context managers around every execution, which ``IDEMPOTENCY["AROUND_EXECUTION"]`` lists.

_NAMES: Final[dict[type[Outcome], str]] = {
    Replayed: "replayed",
    InProgress: "in_progress",
    Held: "held",
    Expired: "expired",
    Mismatched: "mismatched",
}


@dataclass(slots=True)
class ObservedExecution:
    """An execution, as the context managers around it see it.

    Attributes:
        operation: what was asked for. It has no body, but the key: of which there are as many as
            requests, so it is no label of a metric.
        outcome: how it ended. ``"executed"``: a response is stored. ``"released"``: rolled back for
            a response that is not kept. ``"failed"``: an error or a 5xx; it has this value until
            the end. ``"replayed"``, ``"in_progress"``, ``"held"``, ``"expired"``,
            ``"mismatched"``: it was not executed now.
    """

    operation: Operation
    outcome: str = "failed"

    def end_with(self, outcome: Outcome) -> None:
        """Note the outcome."""
        if isinstance(outcome, Executed):
            end = outcome.rolled_back
            if end is None or outcome.payload is not None:
                self.outcome = "executed"
            elif not end.failed:
                self.outcome = "released"
        else:
            self.outcome = _NAMES[type(outcome)]


@contextmanager
def observed(operation: Operation) -> Iterator[ObservedExecution]:
    """The block is the execution of the operation, from before its claim to after its commit."""
    execution = ObservedExecution(operation)
    raised: BaseException | None = None
    with ExitStack() as around:
        for manager in conf.around_execution:
            around.enter_context(manager(execution))
        try:
            yield execution
        except BaseException as error:
            raised = error
            raise
    if raised is not None:  # a manager has swallowed it, but there is no response without it
        raise raised


# Running.


def run(
    store: Store,
    operation: Operation,
    execute: Execute,
    recover: Recover,
    *,
    admit: Admit | None = None,
    together: bool = False,
) -> Outcome:
    """Execute the operation once, or return the outcome of its earlier execution.

    An operation without a lease is executed in the transactional mode: what ``execute`` writes and
    the response it returns are committed together. When it raises, or returns a response without
    a payload, all of it is rolled back and the key is free again. With a lease, the claim is
    committed first and kept alive while ``execute`` runs; then the response is stored, unless
    another attempt has taken over meanwhile.

    Args:
        store: where the record lives.
        operation: what to execute.
        execute: executes it.
        recover: called after the rollback with what ``execute`` raised; returns the response, or
            raises the error again. A payload in its response is stored.
        together: with a lease, whether ``execute`` and the storing of its response are one
            transaction, after that of the claim.
        admit: called with the record before a replay is counted and announced; what it raises
            refuses the replay, and leaves this function.

    Raises:
        StoreUnavailable: the store cannot be reached. Its text says what is known: nothing was
            executed, all of it was rolled back, or the commit was not confirmed.
        OperationInProgress: the database refused to commit because of a conflict.
        ClaimLost: the claim is gone, and no other attempt has it.
    """
    if not conf.around_execution:
        return run_unobserved(store, operation, execute, recover, admit=admit, together=together)
    with observed(operation) as execution:
        outcome = run_unobserved(store, operation, execute, recover, admit=admit, together=together)
        execution.end_with(outcome)
    return outcome


def run_unobserved(
    store: Store,
    operation: Operation,
    execute: Execute,
    recover: Recover,
    *,
    admit: Admit | None = None,
    together: bool = False,
) -> Outcome:
    """:func:`run` without the context managers of the settings around it."""
    if operation.lease is None:
        joined = TransactionalRun(store, operation, execute, recover, admit)
        outcome = joined.try_once() if operation.wait is None else joined.outcome(operation.wait)
    else:

        async def executed(execution: ExecutionContext) -> Result:
            return execute(execution)

        driver, lease = Blocking(), operation.lease
        leased = LeasedRun(
            driver, store, operation, executed, lease, recover, admit, together=together
        )
        outcome = finish(leased.outcome())
    if not isinstance(outcome, Executed):  # its signals were sent on the way
        announce_outcome(outcome, operation)
    return outcome


async def arun(
    store: Store,
    operation: Operation,
    execute: Callable[[ExecutionContext], Awaitable[Result]],
    recover: Recover,
    *,
    admit: Admit | None = None,
) -> Outcome:
    """:func:`run` for a coroutine function, which takes an operation with a lease.

    ``admit`` is called in a thread, because it may ask the database.

    A cancellation is passed on to ``execute``; then the key is free when the lease is over. After
    the end of ``execute``, a cancellation leaves the operation completed.
    """
    if operation.lease is None:
        raise ValueError(
            f"The operation {operation.name} has no lease. arun() needs one, because Django has "
            "no transactions for async code."
        )
    driver, lease = Awaiting(), operation.lease
    leased = LeasedRun(driver, store, operation, execute, lease, recover, admit)
    with observed(operation) as execution:
        try:
            outcome = await leased.outcome()
            execution.end_with(outcome)
        finally:
            if driver.cancelled:
                raise driver.cancelled
        if signal_of(outcome):  # in a thread: a receiver may ask the database
            await sync_to_async(announce_outcome)(outcome, operation)
    return outcome


def replay(record: Record, operation: Operation) -> Replayed | None:
    """The outcome if a record that the caller has read is a replay of the operation, else none."""
    outcome = decide(record, operation)
    if not isinstance(outcome, Replayed):
        return None
    with observed(operation) as execution:
        announce_outcome(outcome, operation)
        execution.end_with(outcome)
    return outcome
