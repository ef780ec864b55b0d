"""The store contract: a store decides who may claim a key, in one atomic step, and keeps facts.

And the configured stores by alias, as in ``CACHES``: ``stores["default"]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from ..conf import conf, did_you_mean
from .records import Claim, Operation, Payload, Record, Status, Step


def no_transactional_mode(reason: str) -> ImproperlyConfigured:
    """The error of a policy that demands the transactional mode where that cannot be had."""
    return ImproperlyConfigured(
        f"An idempotency policy has mode='transactional' with {reason}. Remove mode=, or set "
        "mode='leased' and read its guarantees."
    )


def in_progress(operation: Operation) -> Record:
    """The record that stands for one that cannot be seen, or cannot be locked, now."""
    return Record(key=operation.key, scope=operation.scope, status=Status.IN_PROGRESS)


class Store(ABC):
    """A place where records live. There is one instance per alias, shared by all threads.

    To write a store of your own, subclass this class and run the contract suite over it, as the
    stores of this package do. You must write :meth:`acquire`, :meth:`complete`, :meth:`fail`,
    :meth:`extend`, :meth:`get`, :meth:`record_replay` and :meth:`purge`; each is one atomic step.
    All other methods have a default, which is right for a store without transactions, recovery
    points, batches or a cache. Any method may raise
    :exc:`~idempotency_django.errors.StoreUnavailable` when the store cannot be reached. The stored
    form of a response comes from ``encode()`` and ``decode()`` of :mod:`idempotency_django.stores`.

    Args:
        alias: the store's name in ``IDEMPOTENCY["STORES"]``.
    """

    supports_transactions: ClassVar[bool] = False
    """Whether the store's writes commit and roll back with the effects of the handler.

    The open transaction of such a store holds a claim without a lease, which ends with it: no other
    transaction sees the claim, and it is gone when the transaction rolls back or its process dies.
    The store need not write a record before the claim is completed, or fails.
    """

    supports_steps: ClassVar[bool] = False
    """Whether the store supports steps, with :meth:`steps` and :meth:`save_step`."""

    has_cache: ClassVar[bool] = False
    """Whether :meth:`recall` is implemented."""

    using: str | None = None
    """The database of its transactions, if ``supports_transactions``."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    # What every store must write.

    @abstractmethod
    def acquire(self, operation: Operation) -> Claim | Record:
        """Claim the operation, or return its record.

        The key is free, and is claimed for the caller alone, with an attempt that is one more than
        the record's, if it has

        - no record, or an expired one, which counts only for an operation with ``refuse_expired``;
        - a FAILED record; if it is pinned or has recovery points, only for the same fingerprint;
        - a record in progress whose lease is over, for the same fingerprint, unless it was claimed
          with ``hold``. Its owner is late from then on, and the claim is ``interrupted``.

        Otherwise the record is returned: COMPLETED with its payload, or IN_PROGRESS, or FAILED for
        another fingerprint. (The engine never replays a FAILED record: for the same fingerprint it
        counts as in progress.) It never waits for another owner. When this returns, a claim with
        ``operation.lease`` is visible to all, even if its owner dies. Recovery points are kept with
        the claim, and so is the pin; those of an expired record are not. An interrupted record is
        pinned from then on, as it is unknown what its owner has done.

        A store that can do both in one step may count the replay, if the operation asks for it and
        the completed record is of the same request. The record that it returns is then ``counted``.

        Raises:
            OperationInProgress: the store is too busy to find out more.
        """

    @abstractmethod
    def complete(self, claim: Claim, payload: Payload, *, last: bool = False) -> bool:
        """Store the response. ``False``: the claim has another owner now and nothing was written.

        Its time to live counts from here. If the claim has no record yet, this writes it.

        Args:
            claim: the attempt's.
            payload: the response.
            last: whether nothing follows in the transaction of the claim, so that the store may
                commit it in the same step. If that fails, the end of :meth:`transaction` says what
                the error means.

        Raises:
            OperationInProgress: the key has got another record meanwhile, which the transaction
                could not see. It must roll back.
        """

    @abstractmethod
    def fail(self, claim: Claim, error: str, *, pinned: bool = False, held: bool = False) -> bool:
        """Record why the attempt ended and free the key. ``False``: as for :meth:`complete`.

        Args:
            claim: the attempt's.
            error: why the attempt ended.
            pinned: free it for the same fingerprint only: the attempt may have had effects
                elsewhere, under keys that were derived from this one. A pin that the claim has
                from an earlier attempt stays in any case.
            held: do not free it: no request gets the key, and no purge takes the record, until an
                operator settles it. The record is in progress, ``interrupted`` and ``held`` then,
                and has no owner.
        """

    @abstractmethod
    def extend(self, claim: Claim, seconds: float) -> bool:
        """Let the lease end that many seconds from now. ``False``: as for :meth:`complete`.

        A late owner may still renew its lease if it has no successor yet. One thread renews all
        leases of a process, one after the other, so this never waits.

        Raises:
            OperationInProgress: the record is locked now; the lease has not changed.
        """

    @abstractmethod
    def get(self, key: str, scope: str) -> Record | None:
        """The record as it is, expired or not. It only reads."""

    @abstractmethod
    def record_replay(self, record: Record, operation: Operation, *, last: bool = False) -> None:
        """Note a replay of the record, now or after the running transaction, as the operation asks.

        With ``operation.count_replays`` it is counted in the audit trail; with
        ``operation.extend_on_replay`` the record's time to live starts again. It neither raises nor
        waits: a replay that cannot be counted at once is not counted.

        Args:
            record: the record that is replayed.
            operation: the operation that asks for it.
            last: whether the running transaction has done nothing but find the record, and nothing
                follows in it, so that the store may commit or roll it back in the same step.
        """

    @abstractmethod
    def purge(self, older_than: timedelta, limit: int) -> int:
        """Delete up to ``limit`` records whose lifetime and retention ended ``older_than`` ago.

        The oldest are deleted first, in one short transaction. A record that is locked is left
        for later, so that a purge waits neither for traffic nor for a second purge. A record in
        progress is never deleted before its lease is over, and never if it is held. Returns how
        many were deleted: 0 if there is nothing left, or if the store deletes expired records by
        itself.
        """

    # Configuration.

    def validate(self, policy: Any) -> None:
        """Refuse a policy that demands what this store cannot do; an override calls this one, too.

        It is called for each resolved policy before its first operation, and by the system checks.

        Args:
            policy: a resolved :class:`~idempotency_django.policy.Policy`.

        Raises:
            ImproperlyConfigured: with the requirement of the policy, and the fix.
        """
        if policy.mode == "transactional" and not self.supports_transactions:
            raise no_transactional_mode(
                f"the store {self.alias!r} ({type(self).__name__}), which has no transactions"
            )

    def check(self) -> Sequence[CheckMessage]:
        """The problems of the store's configuration, for the system checks."""
        return []

    # Transactions.

    def transaction(self) -> AbstractContextManager[None]:
        """The transaction in which a claim without a lease, handler and response belong together.

        Within another one, it is a savepoint of that.

        Raises:
            OperationInProgress: the store is too busy to begin one, or to commit it, and has rolled
                back.
        """
        return nullcontext()

    def durable(self, what: str) -> AbstractContextManager[None]:
        """A transaction that is committed at its end, because no other transaction surrounds it.

        Args:
            what: what commits, for the error, such as ``"The step 'charge'"``.

        Raises:
            ImproperlyConfigured: a transaction is open.
        """
        return nullcontext()

    def fenced(self, claim: Claim) -> AbstractContextManager[None]:
        """A transaction that only the owner of a claim with a lease can commit.

        Raises:
            ClaimLost: at its end, after the rollback: the claim has another owner now.
            ImproperlyConfigured: the store has no transactions, or one is open already.
        """
        raise ImproperlyConfigured(
            f"The store {self.alias!r} has no transactions, so it cannot prevent a worker that "
            "lost its lease from committing a step. Use "
            "idempotency_django.stores.database.DatabaseStore."
        )

    def on_commit(self, function: Callable[[], object]) -> None:
        """Call the function once what was written is committed; never if it rolls back."""
        function()

    # Recovery points.

    def steps(self, claim: Claim) -> Sequence[Step]:
        """The recovery points that earlier attempts at the claim's operation stored."""
        return ()

    def save_step(self, claim: Claim, step: Step) -> bool:
        """Store a recovery point in the running transaction. ``False``: as for :meth:`complete`.

        That transaction commits only for the claim's owner; else it ends in ``ClaimLost``.
        """
        raise NotImplementedError

    # Batches.

    def acquire_many(self, operations: Sequence[Operation]) -> Sequence[Claim | Record]:
        """:meth:`acquire` for the operations of a batch, in their order; in one step, if possible.

        None of them has a lease, and no key comes up twice. A replay need not be counted.
        """
        return [self.acquire(operation) for operation in operations]

    def get_many(self, names: Sequence[tuple[str, str]]) -> Sequence[Record | None]:
        """:meth:`get` for several keys, each with its scope, in their order."""
        return [self.get(key, scope) for key, scope in names]

    def complete_many(self, responses: Sequence[tuple[Claim, Payload]]) -> Sequence[bool]:
        """:meth:`complete` for several claims, each with its response, in their order."""
        return [self.complete(claim, payload) for claim, payload in responses]

    # Where a heartbeat, which has a thread of its own, renews the leases.

    def place(self) -> Hashable:
        """Where the calls of this thread find their records now, such as the schema of a tenant.

        ``None``: always at the same place.
        """
        return None

    def dedicated_connection(self, place: Hashable) -> AbstractContextManager[object]:
        """In the block, this thread uses the store over connections of its own, at that place.

        A heartbeat renews leases in the block, so the connections must not come from a pool: if the
        owners of the leases used all connections of the pool, no lease would be renewed. The
        connections are closed at the end.
        """
        return nullcontext()

    # A cache in front of the store.

    def recall(self, operation: Operation) -> Record | None:
        """The completed record of the operation, if it is known without asking the source.

        ``None``: it is not known; call :meth:`acquire`.
        """
        return None

    def forget(self, key: str, scope: str) -> None:
        """Recall the record no more: it is about to be changed or deleted without this store."""


class Stores:
    """Makes each store once, at its first use, from ``IDEMPOTENCY["STORES"]``.

    All threads share a store.

    Attributes:
        made: the stores that were used so far, by alias.
    """

    def __init__(self) -> None:
        self.made: dict[str, Store] = {}

    def __getitem__(self, alias: str) -> Store:
        # Two threads that ask for it at once get the same.
        return self.made.get(alias) or self.made.setdefault(alias, _make(alias))

    def __iter__(self) -> Iterator[str]:
        return iter(conf.stores)

    def all(self) -> list[Store]:
        """Every configured store."""
        return [self[alias] for alias in self]


def _make(alias: str) -> Store:
    if alias not in conf.stores:
        hint = did_you_mean(alias, conf.stores)
        raise ImproperlyConfigured(f"IDEMPOTENCY['STORES'] has no store {alias!r}. {hint}")
    declared: Any = conf.stores[alias]
    where = f"IDEMPOTENCY['STORES'][{alias!r}]"
    names = set(declared) if isinstance(declared, Mapping) else set()
    if not {"BACKEND"} <= names <= {"BACKEND", "OPTIONS"}:
        raise ImproperlyConfigured(
            f"{where} is {declared!r}; it must be a dict with 'BACKEND' (the path of a store "
            "class) and, optionally, 'OPTIONS' (a dict of its arguments)."
        )
    try:
        store = import_string(declared["BACKEND"])(alias, **declared.get("OPTIONS", {}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ImproperlyConfigured(f"{where} cannot be created: {error}.") from error
    if not isinstance(store, Store):
        raise ImproperlyConfigured(
            f"{where} is no subclass of idempotency_django.stores.Store: {declared['BACKEND']!r}."
        )
    return store


stores = Stores()


def _forget_stores(*, setting: str, **_: Any) -> None:
    if setting in ("IDEMPOTENCY", "DATABASES"):
        stores.made.clear()


setting_changed.connect(_forget_stores, dispatch_uid="idempotency_django.stores")
