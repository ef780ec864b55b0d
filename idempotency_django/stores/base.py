"""The store contract: facts in atomic steps, and no decision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import ClassVar

from asgiref.sync import sync_to_async
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..errors import OperationInProgress
from ..records import Claim, Operation, Payload, Record, Step


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

    Such a store holds a claim without a lease by its open transaction: nobody else sees it, and
    it is gone when the transaction rolls back or its process dies.
    """

    supports_steps: ClassVar[bool] = False
    """Whether the store keeps recovery points: :meth:`steps` and :meth:`save_step`."""

    forgets_expired: ClassVar[bool] = False
    """Whether records are gone by themselves when they expire, so that nothing is to be purged."""

    using: str | None = None
    """The database whose transactions it takes part in, where ``supports_transactions``."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    # Each is one atomic step.

    @abstractmethod
    def acquire(self, operation: Operation) -> Claim | Record:
        """Claim the operation, or say what is there.

        The key is free, and claimed for the caller alone, with an attempt that is one more than
        the record's, when it has

        - no record, or an expired one;
        - a FAILED record; where it is pinned or has recovery points, only for the same fingerprint;
        - a record in progress whose lease is over, or that is seen although it has none, for the
          same fingerprint, unless it was claimed with ``hold``. Its owner is late from then on.

        Otherwise the record is returned: COMPLETED with its payload, or IN_PROGRESS, or FAILED for
        another fingerprint. (The engine never replays a FAILED record: for the same fingerprint it
        counts as in progress.) It never waits for another owner. A claim with ``operation.lease``
        is there for all to see, whatever becomes of its owner, when this returns. Recovery points
        are kept with the claim, and so is the pin; those of an expired record are not. What was
        interrupted is pinned from then on, as nobody knows what its owner has done.

        A store that can do both in one step may count the replay, where the operation asks for it
        and its very request is completed; it returns a record that says so.

        Raises:
            OperationInProgress: the store is too busy to say more.
        """

    @abstractmethod
    def complete(self, claim: Claim, payload: Payload) -> bool:
        """Store the answer. ``False``: the claim has another owner now and nothing was written.

        Its time to live counts from here; a store that counts from the claim must do so anew where
        the attempt took a notable part of it.
        """

    @abstractmethod
    def fail(self, claim: Claim, error: str, *, pinned: bool = False) -> bool:
        """Record why the attempt ended and free the key. ``False``: as for :meth:`complete`.

        Args:
            claim: the attempt's.
            error: why it ended.
            pinned: free it for the same fingerprint only: the attempt may have had effects
                elsewhere, under keys that were derived from this one. A pin that the claim has
                from an earlier attempt stays in any case.
        """

    @abstractmethod
    def extend(self, claim: Claim, seconds: float) -> bool:
        """Let the lease end that many seconds from now. ``False``: as for :meth:`complete`.

        An owner that is late but has no successor yet may still do so.

        Raises:
            OperationInProgress: the record is locked at this moment; the lease is what it was.
        """

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

        The oldest go first. What is in progress never goes before its lease is over, and never
        where it is held. Returns how many went, which is 0 when there is nothing left and where
        the store expires by itself.
        """

    # What a store that renews one lease at a time can leave as it is.

    def extend_many(self, claims: Sequence[Claim], seconds: float) -> Sequence[bool | None]:
        """:meth:`extend` for several claims, which a heartbeat renews together.

        Override it where the store can do so in one step: however many leases a process holds, it
        must come round to each of them in time.

        Returns:
            For each claim, in their order: whether its lease ends that many seconds from now, as
            for :meth:`extend`; ``None``: the record is locked at this moment, and the lease is
            what it was.
        """
        return [self._extended(claim, seconds) for claim in claims]

    def _extended(self, claim: Claim, seconds: float) -> bool | None:
        try:
            return self.extend(claim, seconds)
        except OperationInProgress:
            return None

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """What this thread asks of the store in the block goes over connections of its own.

        A heartbeat renews leases in it, so no pool of connections may be in between: where the
        owners of those leases have all of a pool's connections, none would ever be renewed. The
        connections are closed at the end.
        """
        try:
            yield
        finally:
            connections.close_all()

    # What a store without recovery points can leave as it is.

    def steps(self, claim: Claim) -> Sequence[Step]:
        """The recovery points that earlier attempts at the claim's operation stored."""
        return ()

    def save_step(self, claim: Claim, step: Step) -> bool:
        """Store a recovery point in the running transaction. ``False``: as for :meth:`complete`.

        From here to the end of that transaction nobody can take the claim over.
        """
        raise NotImplementedError

    # What a store without transactions can leave as it is.

    def transaction(self, *, after: ExitStack | None = None) -> AbstractContextManager[None]:
        """The transaction in which a claim without a lease, handler and answer belong together.

        Args:
            after: given by a caller who has opened the transaction already and ends it itself;
                it runs these callbacks then. An exception that leaves the block makes the
                caller's transaction roll back.

        Raises:
            OperationInProgress: the store is too busy to begin one, or to commit it, and has rolled
                back.
        """
        return nullcontext()

    def unbroken(self, what: str) -> AbstractContextManager[None]:
        """Keep the transaction of a claim from being ended within the block.

        Args:
            what: is executed in it, for the error: ``"POST /charges/"``.

        Raises:
            ImproperlyConfigured: in the block, in the place of a statement that would end it.
        """
        return nullcontext()

    def durable(self, what: str) -> AbstractContextManager[None]:
        """A transaction that has committed when it ends, because no other surrounds it.

        Args:
            what: is to commit, for the error: ``"The step 'charge'"``.

        Raises:
            ImproperlyConfigured: a transaction is open.
        """
        return nullcontext()

    def fenced(self, claim: Claim) -> AbstractContextManager[None]:
        """A transaction that can only be committed by the owner of a claim with a lease.

        Raises:
            ClaimLost: at its end, after the rollback: the claim has another owner now.
            ImproperlyConfigured: the store has no transactions.
        """
        raise ImproperlyConfigured(
            f"The store {self.alias!r} has no transactions, so it cannot keep a late owner from "
            "committing one. Use idempotency_django.stores.database.DatabaseStore."
        )

    def on_commit(self, function: Callable[[], object]) -> None:
        """Call the function once what was written is committed; never when it rolls back."""
        function()

    # What only a store in front of another one has a use for.

    recalls: ClassVar[bool] = False
    """Whether :meth:`recall` is worth asking."""

    def recall(self, operation: Operation) -> Record | None:
        """The completed record of the operation, where it is known without asking the source.

        ``None``: it is not; :meth:`acquire` tells.
        """
        return None

    def forget(self, key: str, scope: str) -> None:
        """Recall the record no more: it is about to be changed or deleted behind the store."""

    # What any store can leave as it is.

    def purgeable(self, older_than: timedelta) -> int:
        """How many records :meth:`purge` would delete; counts, so it may take a while."""
        return 0

    def check(self) -> Sequence[CheckMessage]:
        """What is wrong with the store's configuration, for the system checks."""
        return []

    def check_live(self) -> Sequence[CheckMessage]:
        """The same, asking the store itself; only called where that is allowed."""
        return []

    # The same for callers that are async. A store whose driver is async overrides them.

    async def aacquire(self, operation: Operation) -> Claim | Record:
        """:meth:`acquire`"""
        return await sync_to_async(self.acquire)(operation)

    async def acomplete(self, claim: Claim, payload: Payload) -> bool:
        """:meth:`complete`"""
        return await sync_to_async(self.complete)(claim, payload)

    async def afail(self, claim: Claim, error: str, *, pinned: bool = False) -> bool:
        """:meth:`fail`"""
        return await sync_to_async(self.fail)(claim, error, pinned=pinned)

    async def aextend(self, claim: Claim, seconds: float) -> bool:
        """:meth:`extend`"""
        return await sync_to_async(self.extend)(claim, seconds)

    async def aget(self, key: str, scope: str) -> Record | None:
        """:meth:`get`"""
        return await sync_to_async(self.get)(key, scope)

    async def arecord_replay(self, record: Record, operation: Operation) -> None:
        """:meth:`record_replay`"""
        await sync_to_async(self.record_replay)(record, operation)

    async def arecall(self, operation: Operation) -> Record | None:
        """:meth:`recall`"""
        return await sync_to_async(self.recall)(operation)
