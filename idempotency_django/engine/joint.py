"""One transaction in which several operations are executed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from django.db import connections

from .. import signals
from ..errors import ClaimLost, StoreUnavailable
from ..errors.operations import ROLLED_BACK_MESSAGE, UNCONFIRMED_MESSAGE
from ..records import Claim, Operation, Payload, Record
from ..stores import Store
from .context import CURRENT, ExecutionContext
from .outcomes import (
    Executed,
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


class AtFault(Exception):  # carries the position of an item out of a transaction
    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position


class Attempt:
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
            AtFault: an item failed, and all of them are rolled back.
            Exception: all of them are rolled back, or nobody knows.
        """
        outcomes: list[Outcome] = []
        try:
            with self.store.transaction():
                claim_or_record = self.store.acquire_many([item.operation for item in self.items])
                self.claimed, self._driver = True, self._connection()
                self.store.on_commit(self._announce)  # before the handlers' own hooks
                with self.store.unbroken(f"a batch of {len(self.items)}"):
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
            raise AtFault(position)  # alone, it is held if its attempts are used up
        execution = ExecutionContext(self.store, claim_or_record, None)
        token = CURRENT.set(execution)
        try:
            result = item.execute(execution)
        except Exception:  # noqa: BLE001  # it is executed again, alone, and raises there
            raise AtFault(position) from None
        finally:
            CURRENT.reset(token)
        if not isinstance(result.payload, Payload):
            raise AtFault(position)
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
