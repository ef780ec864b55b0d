"""Several operations in one transaction, for messages that arrive many at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from .. import signals
from ..conf import conf
from ..errors import ROLLED_BACK_MESSAGE, UNCONFIRMED_MESSAGE, ClaimLost, StoreUnavailable
from ..stores import Store
from ..stores.records import Claim, Operation, Payload, Record
from .context import CURRENT, ExecutionContext
from .outcomes import (
    Executed,
    InProgress,
    Outcome,
    Replayed,
    Result,
    RolledBack,
    announce,
    announce_outcome,
    decide,
    reraise,
)
from .running import observed, run_unobserved

logger = logging.getLogger("idempotency_django")


@dataclass(frozen=True, slots=True)
class Item:
    """One of the operations of a batch.

    Attributes:
        operation: what to execute.
        execute: executes it.
    """

    operation: Operation
    execute: Callable[[ExecutionContext], Result]


def run_many(store: Store, items: Sequence[Item]) -> list[Outcome | Exception]:
    """Execute each of the operations once, in their order; in one transaction if none fails.

    All of them are claimed in one step, executed one after the other, and committed together. If
    one raises, all are rolled back, and each is executed alone, as by
    :func:`~idempotency_django.engine.run`, which records whose failure it was. So no failure undoes
    a neighbour, and their order stays. It is also the way of operations with a lease. If the store
    cannot be reached then, no further one is tried.

    Args:
        store: where the records live.
        items: what to execute.

    Returns:
        For each, in their order: its outcome, or what it raised.
    """
    if not conf.around_execution:
        return _run_many(store, items)
    with ExitStack() as around:
        executions = [around.enter_context(observed(item.operation)) for item in items]
        ended = _run_many(store, items)
        for execution, end in zip(executions, ended, strict=True):
            if not isinstance(end, Exception):
                execution.end_with(end)
    return ended


def _run_many(store: Store, items: Sequence[Item]) -> list[Outcome | Exception]:
    ended: dict[int, Outcome | Exception] = {}
    lost: StoreUnavailable | None = None
    leased = any(item.operation.lease for item in items)
    if len(items) > 1 and store.supports_transactions and not leased:
        batch = _Batch(store, items)
        try:
            ended |= batch.outcomes()
        except Exception as error:  # noqa: BLE001  # what is executed by itself says whose it is
            if not batch.claimed:
                return [error] * len(items)
            lost = batch.lost(error)
    for place, item in enumerate(items):
        if place in ended:
            continue
        end, begun = _run_alone(store, item)
        if isinstance(end, StoreUnavailable) and not begun:
            unreachable = lost or end
            return [ended.get(at, unreachable) for at in range(len(items))]
        ended[place] = end
    return [ended[place] for place in range(len(items))]


def _run_alone(store: Store, item: Item) -> tuple[Outcome | Exception, bool]:
    """Execute one item alone; its outcome, and whether its handler was started."""
    begun = finished = False

    def execute(execution: ExecutionContext) -> Result:
        nonlocal begun, finished
        begun = True
        result = item.execute(execution)
        finished = True
        return result

    try:
        outcome = run_unobserved(store, item.operation, execute, reraise)  # the batch is observed
    except StoreUnavailable as error:
        unconfirmed = finished and not error.rolled_back
        return (_settle_unconfirmed(store, item, error) if unconfirmed else error), begun
    except Exception as error:  # noqa: BLE001  # it is the item's, whatever it is
        return error, begun
    return outcome, begun


def _settle_unconfirmed(store: Store, item: Item, error: StoreUnavailable) -> Outcome | Exception:
    """The outcome of an item whose COMMIT was not confirmed: it is executed by a failure.

    So an item that loses the connection at each attempt runs out of attempts.
    """
    known = StoreUnavailable(ROLLED_BACK_MESSAGE)
    known.__cause__ = error

    def execute(_: ExecutionContext) -> Result:
        raise known

    try:
        return run_unobserved(store, item.operation, execute, reraise)
    except Exception as again:  # noqa: BLE001  # then it is unknown
        return known if again is known else error


def _name(operation: Operation) -> tuple[str, str]:
    return operation.scope, operation.key


class _Batch:
    """One transaction, with all that is claimed and executed in it."""

    def __init__(self, store: Store, items: Sequence[Item]) -> None:
        self.store = store
        self.items = items
        self.claimed = False
        self._completed = False
        self._committed = False
        self._responses: list[tuple[Claim, Payload]] = []

    def outcomes(self) -> dict[int, Outcome]:
        """The outcomes of the items, by their places, without those that are to be run alone.

        Raises:
            Exception: an item failed, or the transaction; all of them are rolled back, or
                it is unknown.
        """
        store, outcomes = self.store, dict[int, Outcome]()
        operations = {_name(item.operation): item.operation for item in reversed(self.items)}
        try:
            with store.transaction():
                # In one order everywhere, so that two batches do not wait for each other.
                names = sorted(operations)
                acquired = store.acquire_many([operations[name] for name in names])
                found = dict(zip(names, acquired, strict=True))
                self.claimed = True
                store.on_commit(self._announce)  # before the handlers' own hooks
                for place, item in enumerate(self.items):
                    # A key that comes up again is run alone.
                    if claim_or_record := found.pop(_name(item.operation), None):
                        outcomes[place] = self._outcome(item, claim_or_record)
                if not all(store.complete_many(self._responses)):
                    raise ClaimLost
                self._completed = True
        except Exception:
            if not self._committed:
                raise
            logger.exception(
                "The work after the commit of a batch of %d operations failed. The operations are "
                "committed, and are not executed again.",
                len(self.items),
            )
        # What is in progress, elsewhere or earlier in this batch, may end differently alone.
        final: dict[int, Outcome] = {
            at: each for at, each in outcomes.items() if not isinstance(each, InProgress)
        }
        for place, outcome in final.items():
            operation = self.items[place].operation
            announce_outcome(outcome, operation)
            if isinstance(outcome, Replayed) and not outcome.record.counted:
                store.record_replay(outcome.record, operation)
        return final

    def lost(self, error: Exception) -> StoreUnavailable:
        """The error of its items if the store stays out of reach."""
        known = not self._completed or (isinstance(error, StoreUnavailable) and error.rolled_back)
        unavailable = StoreUnavailable(ROLLED_BACK_MESSAGE if known else UNCONFIRMED_MESSAGE)
        unavailable.__cause__ = error
        return unavailable

    def _outcome(self, item: Item, claim_or_record: Claim | Record) -> Outcome:
        if not isinstance(claim_or_record, Claim):
            return decide(claim_or_record, item.operation)
        if claim_or_record.interrupted:  # alone, it is held if its attempts are used up
            raise RolledBack(Result(None, None))
        execution = ExecutionContext(self.store, claim_or_record, None)
        token = CURRENT.set(execution)
        try:
            result = item.execute(execution)
        finally:
            execution.is_over = True
            CURRENT.reset(token)
        if not isinstance(result.payload, Payload):
            raise RolledBack(result)
        self._responses.append((claim_or_record, result.payload))
        return Executed(result.response, result.payload)

    def _announce(self) -> None:
        self._committed = True
        for claim, payload in self._responses:
            announce(signals.claimed, claim)
            announce(signals.completed, claim, payload=payload)
