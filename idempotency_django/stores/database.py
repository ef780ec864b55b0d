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

from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's names
from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import connections, transaction
from django.db.models import QuerySet

from ..errors import ClaimLost, OperationInProgress
from ..models import (
    NO_OWNER,
    DatabaseNow,
    IdempotencyKey,
    IdempotencyKeyQuerySet,
    IdempotencyStep,
    unlocked,
)
from .base import Store, in_progress
from .dialects import Dialect, Fault, MySQL, SQLite, described, plain
from .postgresql import PostgreSQL
from .records import Claim, Operation, Payload, Record, Status, Step, encode, new_token
from .transactions import (
    StoreTransaction,
    forbid_atomic_block,
    unpooled_connection,
)

logger = logging.getLogger("idempotency_django")

DIALECTS: Final[dict[str, type[Dialect]]] = {
    "postgresql": PostgreSQL,
    "mysql": MySQL,
    "sqlite": SQLite,
}
"""The differences between databases, by Django's ``vendor``."""

_FREE: Final = {"status": Status.FAILED, "completed_at": DatabaseNow(), "lease_expires_at": None}
# In progress under a lease that is over, with a token that no owner has.
_HELD: Final = {"hold": True, "lease_expires_at": DatabaseNow(), "owner_token": NO_OWNER}


def later(duration: timedelta | None) -> Any:
    """So long after now, by the database's clock; ``None``: never."""
    return None if duration is None else DatabaseNow() + duration


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
        wanted = Claim(operation, 1, new_token())
        try:  # by hand, as the hot path: a block of its own is two frames more in a traceback
            if operation.lease is not None:  # without one, it is of the running transaction
                forbid_atomic_block(self.using, f"The claim of {operation.name}")
            found = self._dialect.claim(wanted, connections[self.using])
            return found if isinstance(found, Claim) else self._decided(wanted, found)
        except DatabaseFault as error:
            self._raise(error)

    def _decided(self, wanted: Claim, found: Claim | Record | None) -> Claim | Record:
        """The claim that was found, or the record, or a claim on the record's key if it is free."""
        operation = wanted.operation
        if isinstance(found, Claim):
            return found
        if found is None:
            return in_progress(operation)
        if not self._is_free(operation, found):
            return found
        with transaction.atomic(using=self.using, savepoint=False):
            record = self._dialect.record(operation.key, operation.scope, "read_locked")
            if record is None:  # another contender is faster
                return in_progress(operation)
            if not self._is_free(operation, record):  # since we looked
                return record
            return self._take_over(operation, record)

    def _is_free(self, operation: Operation, record: Record) -> bool:
        return record.is_free(operation, lambda: self._steps_of(record.record_id).exists())

    def _take_over(self, operation: Operation, record: Record) -> Claim:
        """Claim the key of a record that is free, and locked."""
        if record.begins_anew(operation):
            self._steps_of(record.record_id).delete()
        claim = record.next_claim(operation)
        name, principal, method, path = described(operation)
        mine = self._rows.filter(pk=record.record_id)
        mine.update(
            operation=name,
            fingerprint=operation.fingerprint,
            status=Status.IN_PROGRESS,
            attempt=claim.attempt,
            attempts=mine.ended_attempts(),
            owner_token=claim.token,
            lease_expires_at=later(operation.lease or self._dialect.least_lease),
            hold=operation.hold,
            pinned=record.pins(operation),
            response_status=None,
            response_headers="[]",
            response_body=None,
            error="",
            created_at=later(timedelta(seconds=claim.asked_at - time.monotonic())),
            completed_at=None,
            expires_at=later(operation.ttl),
            purge_at=later(operation.kept),
            replay_count=0,
            last_replayed_at=None,
            principal=principal,
            method=method,
            path=path,
            caused_by=operation.caused_by,
        )
        return claim

    def _steps_of(self, record_id: int) -> QuerySet[IdempotencyStep]:
        return IdempotencyStep.objects.using(self.using).filter(record=record_id)

    def acquire_many(self, operations: Sequence[Operation]) -> Sequence[Claim | Record]:
        claims = [Claim(operation, 1, new_token()) for operation in operations]
        with self._translated():
            found = self._dialect.claim_many(claims) if claims else []
            return list(map(self._decided, claims, found))

    def complete(self, claim: Claim, payload: Payload, *, last: bool = False) -> bool:
        try:  # by hand, as in acquire()
            # A leased handler may have left autocommit off.
            if claim.operation.lease is not None and not connections[self.using].in_atomic_block:
                forbid_atomic_block(self.using, f"The result of {claim.operation.name}")
            return self._dialect.complete(claim, encode(payload), last=last)
        except DatabaseFault as error:
            self._raise(error)

    def complete_many(self, responses: Sequence[tuple[Claim, Payload]]) -> Sequence[bool]:
        encoded = [(claim, encode(payload)) for claim, payload in responses]
        new = [response for response in encoded if not response[0].record_id]
        with self._translated():
            if new:
                self._dialect.insert(new)
            return [not c.record_id or self._dialect.complete(c, each) for c, each in encoded]

    def fail(self, claim: Claim, error: str, *, pinned: bool = False, held: bool = False) -> bool:
        changes: dict[str, Any] = {"error": plain(error, 4096), **(_HELD if held else _FREE)}
        if pinned:
            changes["pinned"] = True
        with self._translated():
            if not claim.record_id:
                self._dialect.insert([(claim, None)])
            return bool(self._mine(claim).update(**changes))

    def extend(self, claim: Claim, seconds: float) -> bool:
        mine = self._mine(claim)
        with self._translated(), transaction.atomic(using=self.using):
            if unlocked(mine).values_list("pk").first():
                mine.update(lease_expires_at=later(timedelta(seconds=seconds)))
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
            given = (step.name, step.attempt, step.result, claim.record_id, claim.token)
            return self._dialect.execute_last(self._dialect.sql["save_step"], *given)

    def get(self, key: str, scope: str) -> Record | None:
        with self._translated():
            return self._dialect.record(key, scope)

    def get_many(self, names: Sequence[tuple[str, str]]) -> Sequence[Record | None]:
        with self._translated():
            found = self._dialect.records(names)
        return [found.get(name) for name in names]

    def record_replay(self, record: Record, operation: Operation, *, last: bool = False) -> None:
        if not (operation.count_replays or operation.extend_on_replay):
            return
        last = last and StoreTransaction.whole(connections[self.using]) is not None
        count = partial(self._count_replay, record, operation, last=last)
        if last or self._dialect.locks_database:  # then another transaction would wait for this one
            count()
        else:
            # On its own, so that its row locks are gone at once and its failure fails nothing.
            self.on_commit(count)

    def _count_replay(self, record: Record, operation: Operation, *, last: bool) -> None:
        try:
            self._dialect.count(record.record_id, operation)
        except DatabaseFault as error:
            if self._dialect.fault(error) is not Fault.BUSY:
                logger.warning("A replay of %s was not counted.", record.key, exc_info=True)
            if last:
                transaction.set_rollback(True, using=self.using)

    def purge(self, older_than: timedelta, limit: int) -> int:
        if "purge_level" in self._dialect.sql and not connections[self.using].in_atomic_block:
            self._dialect.execute(self._dialect.sql["purge_level"])
        with transaction.atomic(using=self.using):
            oldest = unlocked(self._rows.purgeable(older_than).order_by("purge_at"))
            chosen = json.dumps([*oldest.values_list("pk", flat=True)[:limit]])
            self._dialect.execute(self._dialect.sql["purge_steps"], chosen)
            return self._dialect.execute(self._dialect.sql["purge"], chosen)

    def check(self) -> Sequence[CheckMessage]:
        using = self.using
        if using not in connections.settings:
            return [
                Error(
                    f"The store {self.alias!r} uses the database {using!r}, which is not in "
                    "DATABASES.",
                    hint=f"DATABASES has: {', '.join(map(repr, connections.settings))}.",
                    id="idempotency_django.E003",
                )
            ]
        atomic = [name for name, each in connections.settings.items() if each["ATOMIC_REQUESTS"]]
        if not atomic or using in atomic:
            return []
        return [
            Warning(
                f"ATOMIC_REQUESTS is on for {', '.join(map(repr, atomic))}, but the store "
                f"{self.alias!r} uses the database {using!r}.",
                hint=(
                    "Effects in one database and their result in another do not commit together. "
                    "After a crash between the two commits, a retry repeats the effects. Use the "
                    "same database for the store and the effects."
                ),
                id="idempotency_django.W007",
            )
        ]

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
                fence = self._dialect.sql["fence"]
                if not self._dialect.execute_last(fence, claim.record_id, claim.token):
                    raise ClaimLost

    def on_commit(self, function: Callable[[], object]) -> None:
        transaction.on_commit(function, using=self.using, robust=True)

    def place(self) -> str | None:
        return getattr(connections[self.using], "schema_name", None)  # of django-tenants

    def dedicated_connection(self, place: Hashable) -> AbstractContextManager[None]:
        return unpooled_connection(self.using, schema=place)

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
        named = {"pk": claim.record_id} if claim.record_id else {"key": claim.key}
        rows = self._rows.filter(scope=claim.scope, **named)
        return rows.filter(owner_token=claim.token, status=Status.IN_PROGRESS)

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
        self._dialect.raise_translated(error)
