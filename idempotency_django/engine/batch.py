"""Several operations in one transaction, for messages that arrive many at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .. import signals
from ..errors import ClaimLost, StoreUnavailable
from ..records import Claim, Operation, Payload, Record
from ..stores import Store
from . import run
from .context import CURRENT, ExecutionContext
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


class _AtFault(Exception):  # carries the position of an item out of a transaction
    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position


def run_many(store: Store, items: Sequence[Item]) -> list[Outcome | Exception]:
    """Execute each of the operations once, in their order, in as few transactions as possible.

    All of them are claimed in one step, executed one after the other, and committed together. If
    one raises, all are rolled back. The ones before it are then executed together, it is executed
    alone (which records its failure), and the ones after it follow together. So nobody's failure
    undoes a neighbour, and their order stays. Alone
    means as by :func:`~idempotency_django.engine.run`; it is also the way of operations with a
    lease. Where nobody knows whose the failure is, because it came at the COMMIT, each is executed
    alone.

    Args:
        store: where the records live.
        items: what to execute.

    Returns:
        For each, in their order: its outcome, or what it raised.
    """
    return _Batch(store, items).ended()


class _Batch:
    def __init__(self, store: Store, items: Sequence[Item]) -> None:
        self.store = store
        self.items = items
        self._ended: dict[int, Outcome | Exception] = {}

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
            if len(indices) > 1:
                pending += reversed(self._together(indices))
            elif indices:
                self._alone(indices[0])
        return [self._ended[index] for index in everyone]

    def _alone(self, index: int) -> None:
        item = self.items[index]
        try:
            self._ended[index] = run(self.store, item.operation, item.execute, _raise)
        except Exception as error:  # noqa: BLE001  # it is the item's, whatever it is
            self._ended[index] = error

    def _together(self, indices: list[int]) -> list[list[int]]:
        """Execute items in one transaction; return those that are not executed yet, in groups."""
        first, again = self._told_apart(indices)
        attempt = _Attempt(self.store, [self.items[index] for index in first])
        try:
            outcomes = attempt.outcomes()
        except _AtFault as fault:
            culprit = indices.index(first[fault.position])
            return [indices[:culprit], [indices[culprit]], indices[culprit + 1 :]]
        except Exception as error:  # noqa: BLE001  # one of the store's, or one at the COMMIT
            if attempt.claimed and not isinstance(error, StoreUnavailable):
                return [[index] for index in indices]  # alone, each meets its own
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


class _Attempt:
    """One transaction, with all that is claimed and executed in it."""

    def __init__(self, store: Store, items: Sequence[Item]) -> None:
        self.store = store
        self.items = items
        self.claimed = False
        self._answers: list[tuple[Claim, Payload]] = []
        self._committed = False

    def outcomes(self) -> list[Outcome]:
        """What became of each item.

        Raises:
            _AtFault: an item failed, and all of them are rolled back.
            Exception: all of them are rolled back, or nobody knows.
        """
        outcomes: list[Outcome] = []
        try:
            with self.store.transaction():
                claim_or_record = self.store.acquire_many([item.operation for item in self.items])
                self.claimed = True
                self.store.on_commit(self._announce)  # before the handlers' own hooks
                with self.store.unbroken(f"a batch of {len(self.items)}"):
                    for position, record in enumerate(claim_or_record):
                        outcomes.append(self._outcome(position, record))
                if not all(self.store.complete_many(self._answers)):
                    raise ClaimLost
                self._count_replays(outcomes)
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

    def _outcome(self, position: int, claim_or_record: Claim | Record) -> Outcome:
        item = self.items[position]
        if not isinstance(claim_or_record, Claim):
            return decide(claim_or_record, item.operation)
        if claim_or_record.interrupted:
            raise _AtFault(position)  # alone, it is held if its attempts are used up
        execution = ExecutionContext(self.store, claim_or_record, None)
        token = CURRENT.set(execution)
        try:
            result = item.execute(execution)
        except Exception:  # noqa: BLE001  # it is executed again, alone, and raises there
            raise _AtFault(position) from None
        finally:
            CURRENT.reset(token)
        if not isinstance(result.payload, Payload):
            raise _AtFault(position)
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


def _raise(error: Exception) -> Result:
    raise error
