"""The store in the project's own database: the effect and its response commit together."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, ClassVar, Final, NoReturn

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import connections, transaction
from django.db.models import F, QuerySet

from ...errors import ClaimLost, OperationInProgress
from ...models import (
    NO_OWNER,
    DatabaseNow,
    IdempotencyKey,
    IdempotencyKeyQuerySet,
    IdempotencyStep,
    unlocked,
)
from ..atomic_blocks import unpooled_connection
from ..base import Store, in_progress
from ..codec import encode, encode_step
from ..records import Claim, Operation, Payload, Record, Status, Step, new_token
from ..rows import Row
from .checks import check_database
from .dialects import DIALECTS, Dialect, described, plain
from .faults import Fault
from .transactions import (
    StoreTransaction,
    forbid_atomic_block,
    raise_translated,
    without_autocommit,
)

logger = logging.getLogger("idempotency_django")


def lifetime(operation: Operation) -> dict[str, Any]:
    """The columns that say how long a row lives that is written or used now."""
    ttl, kept = operation.ttl, operation.kept
    return {
        "expires_at": None if ttl is None else DatabaseNow() + ttl,
        "purge_at": None if kept is None else DatabaseNow() + kept,
    }


def columns(claim: Claim) -> dict[str, Any]:
    """The columns that say which attempt a row is of, which is in progress."""
    operation = claim.operation
    name, principal, method, path = described(operation)
    began = DatabaseNow() + timedelta(seconds=claim.asked_at - time.monotonic())
    return {
        "operation": name,
        "fingerprint": operation.fingerprint,
        "status": Status.IN_PROGRESS,
        "attempt": claim.attempt,
        "owner_token": claim.token,
        "hold": operation.hold,
        "created_at": began,
        "principal": principal,
        "method": method,
        "path": path,
        "caused_by": operation.caused_by,
        **lifetime(operation),
    }


_COUNTED: Final = {"replay_count": F("replay_count") + 1, "last_replayed_at": DatabaseNow()}
_FREE: Final = {"status": Status.FAILED, "completed_at": DatabaseNow(), "lease_expires_at": None}
# In progress under a lease that is over, with a token that no owner has.
_HELD: Final = {"hold": True, "lease_expires_at": DatabaseNow(), "owner_token": NO_OWNER}


class DatabaseStore(Store):
    """Records as rows of :class:`~idempotency_django.models.IdempotencyKey`.

    Args:
        alias: the store's name in ``IDEMPOTENCY["STORES"]``.
        using: the database to keep them in, by its alias in ``DATABASES``. It must be the
            database that the effects are written to, and never a replica. All statements go there,
            and no database router is asked.
        combine_statements: whether PostgreSQL gets BEGIN in one message with the claim, and COMMIT
            in one with the response, where psycopg 3 can do so. Set it to ``False`` behind a pooler
            that reserves a connection for a client that sends several statements in one message,
            such as Amazon RDS Proxy ("pinning").
    """

    supports_transactions: ClassVar[bool] = True
    supports_steps: ClassVar[bool] = True
    using: str

    def __init__(
        self,
        alias: str,
        *,
        using: str = "default",
        combine_statements: bool = True,
    ) -> None:
        super().__init__(alias)
        self.using = using
        self.combine_statements = combine_statements

    def acquire(self, operation: Operation) -> Claim | Record:
        connection = connections[self.using]
        if operation.lease is not None or not connection.in_atomic_block:
            self._forbid_misplaced(operation)
        wanted = Claim(operation, 1, new_token())
        try:  # by hand, as the hot path: a block of its own is two frames more in a traceback
            found = self._dialect.claim(wanted, connection)
            return found if isinstance(found, Claim) else self._decided(wanted, found)
        except DatabaseFault as error:
            self._raise(error)

    def _forbid_misplaced(self, operation: Operation) -> None:
        """Refuse a lease in a transaction, and none outside of one: nothing would hold it."""
        if operation.lease is not None:
            with self._translated():
                forbid_atomic_block(self.using, f"The claim of {operation.name}")
        elif not connections[self.using].in_atomic_block:
            raise transaction.TransactionManagementError(
                f"The claim of {operation.name} has no lease, so it needs a transaction, but no "
                "transaction is open. Open one with the store's transaction(), or give the "
                "operation a lease."
            )

    def _decided(self, wanted: Claim, found: Claim | Row | None) -> Claim | Record:
        """The claim that was found, or the record, or a claim on the record's key if it is free."""
        operation = wanted.operation
        if isinstance(found, Claim):
            return found
        if found is None:
            return in_progress(operation)
        if not self._is_free(operation, found):
            return found.record(operation.key, operation.scope)
        with transaction.atomic(using=self.using, savepoint=False):
            row = self._dialect.row("read_locked", found.record_id)
            if row is None:  # another contender is faster
                return in_progress(operation)
            if not self._is_free(operation, row):  # since we looked
                return row.record(operation.key, operation.scope)
            return self._take_over(operation, row)

    def _is_free(self, operation: Operation, row: Row) -> bool:
        return row.is_free(operation, lambda: self._steps_of(row.record_id).exists())

    def _take_over(self, operation: Operation, row: Row) -> Claim:
        """Claim the key of a row that is free, and locked."""
        if row.begins_anew(operation):
            self._steps_of(row.record_id).delete()
        claim = row.next_claim(operation)
        lease = operation.lease or self._dialect.least_lease
        mine = self._rows.filter(pk=row.record_id)
        mine.update(
            **columns(claim),
            attempts=mine.ended_attempts(),
            lease_expires_at=DatabaseNow() + lease,
            pinned=row.pins(operation),
            response_status=None,
            response_headers="[]",
            response_body=None,
            error="",
            completed_at=None,
            replay_count=0,
            last_replayed_at=None,
        )
        return claim

    def _steps_of(self, record_id: int) -> QuerySet[IdempotencyStep]:
        return IdempotencyStep.objects.using(self.using).filter(record=record_id)

    def acquire_many(self, operations: Sequence[Operation]) -> Sequence[Claim | Record]:
        claims = [Claim(operation, 1, new_token()) for operation in operations]
        for operation in operations[:1]:
            self._forbid_misplaced(operation)
        with self._translated():
            found = self._dialect.claim_many(claims) if claims else []
            return list(map(self._decided, claims, found))

    def complete(self, claim: Claim, payload: Payload, *, last: bool = False) -> bool:
        try:  # by hand, as in acquire()
            if claim.operation.lease is not None:
                self._require_commit(claim)
            return self._dialect.complete(claim, encode(payload), last=last)
        except DatabaseFault as error:
            self._raise(error)

    def complete_many(self, responses: Sequence[tuple[Claim, Payload]]) -> Sequence[bool]:
        encoded = [(claim, encode(payload)) for claim, payload in responses]
        new = [response for response in encoded if not response[0].record_id]
        ours = StoreTransaction.whole(connections[self.using])
        if responses and ours is not None:
            ours.holds_effects = True
        with self._translated():
            if new:
                self._dialect.insert_many(new)
            return [not c.record_id or self._dialect.complete(c, each) for c, each in encoded]

    def fail(self, claim: Claim, error: str, *, pinned: bool = False, held: bool = False) -> bool:
        with self._translated():
            changes: dict[str, Any] = {"error": plain(error, 4096)}
            changes |= _HELD if held else _FREE
            if pinned:
                changes["pinned"] = True
            if claim.record_id:
                return bool(self._mine(claim).update(**changes))
            changes = columns(claim) | changes
            if held:
                changes["owner_token"] = claim.origin
            self._rows.bulk_create([IdempotencyKey(key=claim.key, scope=claim.scope, **changes)])
        return True

    def extend(self, claim: Claim, seconds: float) -> bool:
        mine = self._mine(claim)
        with self._translated(), transaction.atomic(using=self.using):
            if unlocked(mine).values_list("pk").first():
                mine.update(lease_expires_at=DatabaseNow() + timedelta(seconds=seconds))
                return True
            if mine.exists():
                raise OperationInProgress("The record is locked by another transaction.")
            return False

    def steps(self, claim: Claim) -> Sequence[Step]:
        steps = self._steps_of(claim.record_id).order_by("pk")
        with self._translated():
            return [Step(**row) for row in steps.values("name", "attempt", "result")]

    def save_step(self, claim: Claim, step: Step) -> bool:
        with self._translated():
            return self._dialect.save_step(claim, encode_step(step))

    def get(self, key: str, scope: str) -> Record | None:
        with self._translated():
            row = self._dialect.read(key, scope)
        return row.record(key, scope) if row else None

    def get_many(self, names: Sequence[tuple[str, str]]) -> Sequence[Record | None]:
        with self._translated():
            rows = self._dialect.read_many(names)
        return [rows[name].record(*name) if name in rows else None for name in names]

    def record_replay(self, record: Record, operation: Operation) -> None:
        if not (operation.count_replays or operation.extend_on_replay):
            return
        ours = StoreTransaction.whole(connections[self.using])
        counts_last = "count" in self._dialect.sql and not operation.extend_on_replay
        if counts_last and ours is not None and not ours.holds_effects:
            ours.replayed.append(record.record_id)
            return
        count = partial(self._count_replay, record, operation)
        if self._dialect.locks_database:  # as this transaction does; another one would wait
            count()
        else:
            # On its own, so that its row locks are gone at once and its failure fails nothing.
            self.on_commit(count)

    def _count_replay(self, record: Record, operation: Operation) -> None:
        changes = _COUNTED if operation.count_replays else {}
        if operation.extend_on_replay:
            changes = changes | lifetime(operation)
        mine = self._rows.filter(pk=record.record_id)
        try:
            if "count" in self._dialect.sql and not operation.extend_on_replay:
                self._dialect.execute(self._dialect.count([record.record_id]), record.record_id)
                return
            with transaction.atomic(using=self.using):
                if unlocked(mine).values_list("pk").first():
                    mine.update(**changes)
        except DatabaseFault:
            logger.warning("A replay of %s was not counted.", record.key, exc_info=True)

    def purge(self, older_than: timedelta, limit: int) -> int:
        if "purge_level" in self._dialect.sql and not connections[self.using].in_atomic_block:
            self._dialect.execute(self._dialect.sql["purge_level"])
        with transaction.atomic(using=self.using):
            oldest = unlocked(self._rows.purgeable(older_than).order_by("purge_at"))
            chosen = json.dumps([*oldest.values_list("pk", flat=True)[:limit]])
            self._dialect.execute(self._dialect.sql["purge_steps"], chosen)
            return self._dialect.execute(self._dialect.sql["purge"], chosen)

    def check(self) -> Sequence[CheckMessage]:
        return check_database(self.alias, self.using)

    # Transactions.

    def transaction(self) -> AbstractContextManager[None]:
        return StoreTransaction(self._dialect, spans_operation=True)

    @contextmanager
    def durable(self, what: str) -> Iterator[None]:
        with self._translated():
            forbid_atomic_block(self.using, what)
        with StoreTransaction(self._dialect):
            yield

    @contextmanager
    def fenced(self, claim: Claim) -> Iterator[None]:
        # Within another transaction, the fence would keep the lease from being renewed.
        with self.durable(f"atomic() of {claim.operation.name}"):
            yield
            # Last, so that no request waits for an owner that is paused before it commits.
            with self._translated():
                if not self._dialect.fence(claim):
                    raise ClaimLost

    def was_ended_by_server(self, error: BaseException) -> bool:
        return self._dialect.fault(error) is Fault.ENDED

    def on_commit(self, function: Callable[[], object]) -> None:
        transaction.on_commit(function, using=self.using, robust=True)

    def place(self) -> str | None:
        return getattr(connections[self.using], "schema_name", None)  # of django-tenants

    def dedicated_connection(self, place: Hashable) -> AbstractContextManager[None]:
        return unpooled_connection(self.using, schema=place)

    def _require_commit(self, claim: Claim) -> None:
        """Refuse the response of a leased handler that has left autocommit off."""
        connection = connections[self.using]
        if not (connection.in_atomic_block or connection.get_autocommit()):
            raise without_autocommit(self.using, f"The result of {claim.operation.name}")

    @cached_property
    def _dialect(self) -> Dialect:
        vendor = connections[self.using].vendor
        if vendor not in DIALECTS:
            raise ImproperlyConfigured(
                f"DatabaseStore supports {', '.join(DIALECTS)}; the database {self.using!r} is "
                f"{vendor!r}."
            )
        return DIALECTS[vendor](self.using, combine=self.combine_statements)

    @property
    def _rows(self) -> IdempotencyKeyQuerySet:
        return IdempotencyKeyQuerySet(IdempotencyKey, using=self.using)

    def _mine(self, claim: Claim) -> IdempotencyKeyQuerySet:
        """The row of a claim, as long as it is its owner's."""
        return self._rows.filter(
            pk=claim.record_id, owner_token=claim.token, status=Status.IN_PROGRESS
        )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate the database's errors of contention or connection into the store's."""
        try:
            yield
        except DatabaseFault as error:
            self._raise(error)

    def _raise(self, error: DatabaseFault) -> NoReturn:
        connection = connections[self.using]
        ours = StoreTransaction.whole(connection)
        if ours is not None and ours.sent_commit:  # whose end says what that means
            raise error
        if not connection.in_atomic_block:  # do not leave it broken to the next request
            connection.close_if_unusable_or_obsolete()
        raise_translated(self._dialect, error)
