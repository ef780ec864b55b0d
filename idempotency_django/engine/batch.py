"""Several operations in one transaction, for messages that arrive many at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass

from django.db import connections

from .. import signals
from ..conf import conf
from ..errors import ROLLED_BACK_MESSAGE, UNCONFIRMED_MESSAGE, ClaimLost, StoreUnavailable
from ..records import Claim, Operation, Payload, Record
from ..stores import Store
from . import run
from .context import CURRENT, ExecutionContext
from .observing import UNOBSERVED, Observation
from .outcomes import (
    Executed,
    InProgress,
    Mismatched,
    Outcome,
    Replayed,
    Result,
    announce,
    announcement,
    decide,
    send,
)

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


class _ItemFailed(Exception):  # carries the position of an item out of a transaction
    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position


class _BatchTransaction:
    """One transaction, with all that is claimed and executed in it."""

    def __init__(self, store: Store, items: Sequence[Item]) -> None:
        self.store = store
        self.items = items
        self.claimed = False
        self._completed = False
        self._driver: object = None
        self._answers: list[tuple[Claim, Payload]] = []
        self._committed = False

    def outcomes(self) -> list[Outcome]:
        """What became of each item.

        Raises:
            _ItemFailed: an item failed, and all of them are rolled back.
            Exception: all of them are rolled back, or nobody knows.
        """
        outcomes: list[Outcome] = []
        try:
            with self.store.transaction():
                claim_or_record = self.store.acquire_many([item.operation for item in self.items])
                self.claimed, self._driver = True, self._connection()
                self.store.on_commit(self._announce)  # before the handlers' own hooks
                with self.store.guard_transaction(f"a batch of {len(self.items)}"):
                    for position, record in enumerate(claim_or_record):
                        outcomes.append(self._outcome(position, record))
                if not all(self.store.complete_many(self._answers)):
                    raise ClaimLost
                self._count_replays(outcomes)
                self._completed = True
        except Exception:
            if not self._committed:
                raise
            logger.exception(
                "What was to follow the commit of a batch of %d operations failed. The operations "
                "are committed, and are not executed again.",
                len(self.items),
            )
        self._announce_others(outcomes)
        return outcomes

    @property
    def is_lost(self) -> bool:
        """Whether the connection was, after a rollback: Django replaces one that cannot do it."""
        return self._connection() is not self._driver

    def _connection(self) -> object:
        """The driver's."""
        return None if self.store.using is None else connections[self.store.using].connection

    def lost(self, error: Exception | None) -> StoreUnavailable:
        """What to say of its items if the store stays out of reach."""
        known = not self._completed or (isinstance(error, StoreUnavailable) and error.rolled_back)
        unavailable = StoreUnavailable(ROLLED_BACK_MESSAGE if known else UNCONFIRMED_MESSAGE)
        unavailable.__cause__ = error
        return unavailable

    def _outcome(self, position: int, claim_or_record: Claim | Record) -> Outcome:
        item = self.items[position]
        if not isinstance(claim_or_record, Claim):
            return decide(claim_or_record, item.operation)
        if claim_or_record.interrupted:
            raise _ItemFailed(position)  # alone, it is held if its attempts are used up
        execution = ExecutionContext(self.store, claim_or_record, None)
        token = CURRENT.set(execution)
        try:
            result = item.execute(execution)
        except Exception:  # noqa: BLE001  # it is executed again, alone, and raises there
            raise _ItemFailed(position) from None
        finally:
            CURRENT.reset(token)
        if not isinstance(result.payload, Payload):
            raise _ItemFailed(position)
        self._answers.append((claim_or_record, result.payload))
        return Executed(result.response)

    def _count_replays(self, outcomes: list[Outcome]) -> None:
        pairs = zip(self.items, outcomes, strict=True)
        replays = [(o.record, i.operation) for i, o in pairs if isinstance(o, Replayed)]
        self.store.record_replays([each for each in replays if not each[0].counted])

    def _announce(self) -> None:
        self._committed = True
        for claim, payload in self._answers:
            announce(signals.claimed, claim)
            announce(signals.completed, claim, payload=payload)

    def _announce_others(self, outcomes: list[Outcome]) -> None:
        for item, outcome in zip(self.items, outcomes, strict=True):
            message = announcement(outcome)
            if message:
                send(message[0], item.operation, **message[1])


class _Unreachable(Exception):  # the store, once more, before anything is executed
    def __init__(self, error: StoreUnavailable) -> None:
        super().__init__()
        self.error = error


def run_many(store: Store, items: Sequence[Item]) -> list[Outcome | Exception]:
    """Execute each of the operations once, in their order, in as few transactions as possible.

    All of them are claimed in one step, executed one after the other, and committed together. If
    one raises, all are rolled back. The ones before it are then executed together, it is executed
    alone (which records its failure), and the ones after it follow together. So nobody's failure
    undoes a neighbour, and their order stays. Alone means as by
    :func:`~idempotency_django.engine.run`; it is also the way of operations with a lease.

    Where nobody knows whose the failure is, because it came at the COMMIT or the connection is
    lost, each is executed alone. If the store cannot be reached then, no further one is tried.

    Args:
        store: where the records live.
        items: what to execute.

    Returns:
        For each, in their order: its outcome, or what it raised.
    """
    if not conf.around_execution:
        return _Batch(store, items).ended()
    observed = [_ObservedItem(item) for item in items]
    ended = _Batch(store, [each.item for each in observed]).ended()
    for each, end in zip(observed, ended, strict=True):
        each.leave(end)
    return ended


class _ObservedItem:
    """An item and the hooks around it, in a context of their own: they overlap those of others.

    They are entered before the batch and left after it, once, however often it is begun again.
    """

    def __init__(self, item: Item) -> None:
        self._observation, self._context = Observation(item.operation), copy_context()
        self._context.run(self._observation.__enter__)
        self._execute = self._observation.executing(item.execute)
        self.item = Item(item.operation, self._executed)

    def _executed(self, execution: ExecutionContext) -> Result:
        self._context.run(CURRENT.set, execution)
        return self._context.run(self._execute, execution)

    def leave(self, ended: Outcome | Exception) -> None:
        error = ended if isinstance(ended, Exception) else None
        if not isinstance(ended, Exception):
            self._observation.ended(ended)
        self._context.run(self._observation.__exit__, None, error, None)


class _Batch:
    def __init__(self, store: Store, items: Sequence[Item]) -> None:
        self.store = store
        self.items = items
        self._ended: dict[int, Outcome | Exception] = {}
        self._lost: dict[int, StoreUnavailable] = {}
        """What to say of those that were executed, if the store stays out of reach."""

    def ended(self) -> list[Outcome | Exception]:
        everyone = range(len(self.items))
        together = self.store.supports_transactions and not any(
            item.operation.lease for item in self.items
        )
        pending: list[list[int]] = [[*everyone]]
        if not together:
            pending = [[index] for index in reversed(everyone)]
        while pending:
            indices = pending.pop()
            try:
                if len(indices) > 1:
                    pending += reversed(self._together(indices))
                elif indices:
                    self._alone(indices[0])
            except _Unreachable as unreachable:
                for index in everyone:
                    told = self._lost.get(index, unreachable.error)
                    self._ended.setdefault(index, told)
                break
        return [self._ended[index] for index in everyone]

    def _alone(self, index: int) -> None:
        item, begun, finished = self.items[index], False, False

        def execute(execution: ExecutionContext) -> Result:
            nonlocal begun, finished
            begun = True
            result = item.execute(execution)
            finished = True
            return result

        ended: Outcome | Exception
        try:
            ended = run(self.store, item.operation, execute, _raise, observation=UNOBSERVED)
        except Exception as error:  # noqa: BLE001  # it is the item's, whatever it is
            ended = error
        if self._lost and isinstance(ended, StoreUnavailable):
            if not begun:
                raise _Unreachable(ended)
            if finished and not ended.rolled_back:
                ended = self._looked_up(item, ended)
        self._ended[index] = ended

    def _looked_up(self, item: Item, error: StoreUnavailable) -> Outcome | Exception:
        """What became of an item whose COMMIT was not confirmed.

        If it was rolled back, that is recorded as a failure: who loses the connection at each
        attempt is to run out of them.
        """
        known = StoreUnavailable(ROLLED_BACK_MESSAGE)
        known.__cause__ = error

        def execute(_: ExecutionContext) -> Result:
            raise known

        try:
            return run(self.store, item.operation, execute, _raise, observation=UNOBSERVED)
        except Exception as again:  # noqa: BLE001  # then nobody knows
            return known if again is known else error

    def _together(self, indices: list[int]) -> list[list[int]]:
        """Execute items in one transaction; return those that are not executed yet, in groups."""
        first, again = self._told_apart(indices)
        attempt = _BatchTransaction(self.store, [self.items[index] for index in first])
        try:
            outcomes = attempt.outcomes()
        except _ItemFailed as fault:
            culprit = indices.index(first[fault.position])
            after = indices[culprit + 1 :]
            if not attempt.is_lost:
                return [indices[:culprit], [indices[culprit]], after]
            # One before it may have lost the connection, and it was the first to notice.
            suspects = indices[: culprit + 1]
            self._lost |= dict.fromkeys(suspects, attempt.lost(None))
            return [*([index] for index in suspects), after]
        except Exception as error:  # noqa: BLE001  # one of the store's, or one at the COMMIT
            if attempt.claimed:
                if attempt.is_lost or isinstance(error, StoreUnavailable):
                    self._lost |= dict.fromkeys(indices, attempt.lost(error))
                return [[index] for index in indices]  # alone, each meets its own
            if self._lost and isinstance(error, StoreUnavailable):
                raise _Unreachable(error) from None
            self._ended |= dict.fromkeys(indices, error)
            return []
        left = []
        for index, outcome in zip(first, outcomes, strict=True):
            if self._is_final(outcome, self.items[index].operation):
                self._ended[index] = outcome
            else:
                left.append([index])
        return [*left, again]

    def _told_apart(self, indices: list[int]) -> tuple[list[int], list[int]]:
        """The first item of each operation, and those that repeat one, which wait for its end."""
        first: dict[tuple[str, str], int] = {}
        for index in indices:
            operation = self.items[index].operation
            first.setdefault((operation.key, operation.scope), index)
        return [*first.values()], [index for index in indices if index not in first.values()]

    def _is_final(self, outcome: Outcome, operation: Operation) -> bool:
        """Whether executing it alone could not end in another way."""
        match outcome:
            case InProgress():
                return operation.wait is None
            case Mismatched(record):
                return record.fingerprint not in operation.aliases
            case _:
                return True


def _raise(error: Exception) -> Result:
    raise error
