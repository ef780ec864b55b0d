"""The store contract: facts in atomic steps, and no decision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import ClassVar

from django.core.checks import CheckMessage

from ..records import Claim, Operation, Payload, Record


class Store(ABC):
    """Where records live. One instance per alias, shared by all threads.

    Write a store of your own by subclassing this and running the contract suite over it, as the
    stores of this package do. Any method may raise
    :exc:`~idempotency_django.errors.StoreUnavailable` when the store cannot be reached.

    Args:
        alias: the store's name in ``IDEMPOTENCY["STORES"]``.
    """

    supports_transactions: ClassVar[bool] = False
    """Whether what the store writes commits and rolls back with the effects of the handler.

    Such a store holds a claim by its open transaction: nobody else sees it, and it is gone when
    the transaction rolls back or its process dies.
    """

    using: str | None = None
    """The database whose transactions it takes part in, where ``supports_transactions``."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    # Each is one atomic step.

    @abstractmethod
    def acquire(self, operation: Operation) -> Claim | Record:
        """Claim the operation, or say what is there.

        The key is free, and claimed for the caller alone, when it has no record, a FAILED one or
        an expired one; the attempt is then one more than the record's. Otherwise the record is
        returned: COMPLETED with its payload, or IN_PROGRESS. It never waits for another owner.

        A store that can do both in one step may count the replay, where the operation asks for it
        and its very request is completed; it returns a record that says so.

        Raises:
            OperationInProgress: the store is too busy to say more.
        """

    @abstractmethod
    def complete(self, claim: Claim, payload: Payload) -> bool:
        """Store the answer. ``False``: the claim has another owner now and nothing was written."""

    @abstractmethod
    def fail(self, claim: Claim, error: str) -> bool:
        """Record why the attempt ended and free the key. ``False``: as for :meth:`complete`."""

    @abstractmethod
    def get(self, key: str, scope: str) -> Record | None:
        """The record as it is, expired or not; reads only."""

    @abstractmethod
    def record_replay(self, record: Record, operation: Operation) -> None:
        """Note a replay of the record, now or after the running transaction, as far as it asks.

        With ``operation.count_replays`` it is counted in the audit trail; with
        ``operation.extend_on_replay`` the record's time to live starts anew. It neither raises nor
        waits: a replay that cannot be counted at once is not counted.
        """

    @abstractmethod
    def purge(self, older_than: timedelta, limit: int) -> int:
        """Delete up to ``limit`` records whose lifetime and retention ended ``older_than`` ago.

        The oldest go first, what is in progress never goes; returns how many went, which is 0
        when there is nothing left and where the store expires by itself.
        """

    # What a store without transactions can leave as it is.

    def transaction(self, *, after: ExitStack | None = None) -> AbstractContextManager[None]:
        """The transaction in which the claim, the handler and the answer belong together.

        Args:
            after: given by a caller who has opened the transaction already and ends it itself;
                it runs these callbacks then. An exception that leaves the block makes the
                caller's transaction roll back.

        Raises:
            OperationInProgress: the store is too busy to begin one.
        """
        return nullcontext()

    def on_commit(self, function: Callable[[], object]) -> None:
        """Call the function once what was written is committed; never when it rolls back."""
        function()

    def purgeable(self, older_than: timedelta) -> int:
        """How many records :meth:`purge` would delete; counts, so it may take a while."""
        return 0

    def check(self) -> Sequence[CheckMessage]:
        """What is wrong with the store's configuration, for the system checks."""
        return []

    def check_live(self) -> Sequence[CheckMessage]:
        """The same, asking the store itself; only called where that is allowed."""
        return []
