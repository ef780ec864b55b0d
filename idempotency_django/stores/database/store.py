"""The store in the project's own database: the effect and its response commit together."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, ClassVar, Final, NoReturn

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import connections, transaction
from django.db.models import BooleanField, ExpressionWrapper, F, Q, QuerySet
from django.db.models.functions import Coalesce

from ...errors import ClaimLost, OperationInProgress, StoreUnavailable
from ...models import (
    NO_OWNER,
    DatabaseNow,
    IdempotencyKey,
    IdempotencyKeyQuerySet,
    IdempotencyStep,
    lease_is_over,
    unlocked,
)
from ..atomic_blocks import unpooled_connection
from ..base import Store, in_progress
from ..codec import decode, encode, encode_step
from ..records import Claim, Operation, Payload, Record, Status, Step, new_token
from .checks import check_database, check_migrated, check_writable
from .dialects import DIALECTS, Dialect, plain
from .transactions import (
    StoreTransaction,
    forbid_atomic_block,
    raise_translated,
)

logger = logging.getLogger("idempotency_django")


def lifetime(operation: Operation) -> dict[str, Any]:
    """The columns that say how long a row lives that is written or used now."""
    if operation.ttl is None:
        return {"expires_at": None, "purge_at": None}
    return {
        "expires_at": DatabaseNow() + operation.ttl,
        "purge_at": DatabaseNow() + (operation.ttl + operation.retention),
    }


def record_of(key: str, scope: str, row: tuple[Any, ...], *, counted: bool = False) -> Record:
    """The record in a row of the columns that a dialect selects."""
    record_id, status, attempt, fingerprint, code, headers, body, *facts = row
    expired, lapsed, hold, lease_left, ttl_left = facts
    interrupted = status == Status.IN_PROGRESS and bool(lapsed)
    completed = status == Status.COMPLETED
    return Record(
        key=key,
        scope=scope,
        status=Status(status),
        attempt=attempt,
        fingerprint=fingerprint,
        payload=decode(code, headers, body) if completed else None,
        expired=bool(expired) and status != Status.IN_PROGRESS,
        interrupted=interrupted,
        held=interrupted and bool(hold),
        lease_left=None if lease_left is None else max(0.0, lease_left),
        ttl_left=None if ttl_left is None else float(ttl_left),
        counted=counted,
        record_id=record_id,
    )


def take_over(dialect: Dialect, operation: Operation, before: Record) -> Claim | Record:
    """Claim a key that has a record, if it is free, unless another contender is faster.

    Args:
        dialect: of the database that has the record.
        operation: what wants the key.
        before: the record, as it was seen before anything was locked.
    """
    mine = IdempotencyKeyQuerySet(IdempotencyKey, using=dialect.using).filter(pk=before.record_id)
    row = _locked(dialect, operation, mine)
    if row is None:
        return in_progress(operation)
    attempt, token, status, same, expired, interrupted, hold, pinned = row
    expired = expired and not operation.refuse_expired
    if status == Status.IN_PROGRESS and not (interrupted and same and not hold):
        return before if before.status is Status.IN_PROGRESS else in_progress(operation)
    if status == Status.COMPLETED and not expired:
        return in_progress(operation)  # since we looked; the next retry gets its response
    steps = IdempotencyStep.objects.using(dialect.using).filter(record=before.record_id)
    if status == Status.IN_PROGRESS:
        pinned = True  # the effects of its owner are unknown
    elif expired or status == Status.COMPLETED:
        pinned = False
        steps.delete()
    elif not same and (pinned or steps.exists()):
        failed_for_another = (
            before.status is Status.FAILED and before.fingerprint != operation.fingerprint
        )
        return before if failed_for_another else in_progress(operation)  # since we looked, likewise
    late = status == Status.IN_PROGRESS
    resumed = late or (same and not expired)
    token = new_token(token if resumed else "")
    claim = Claim(operation, attempt + 1, token, before.record_id, interrupted=late)
    mine.update(**_fresh(claim), pinned=pinned)
    return claim


def _locked(
    dialect: Dialect, operation: Operation, rows: QuerySet[Any, Any]
) -> tuple[Any, ...] | None:
    """The facts that a take-over depends on; the row is locked from here on."""
    described: QuerySet[Any, Any] = rows.annotate(
        same=_is(fingerprint=operation.fingerprint),
        expired=_is(expires_at__lte=DatabaseNow()),
        interrupted=_is(lease_is_over()),
    )
    free: Any = unlocked(dialect.lockable(described, operation))
    row: tuple[Any, ...] | None = free.values_list(
        "attempt", "owner_token", "status", "same", "expired", "interrupted", "hold", "pinned"
    ).first()
    return row


def _is(*conditions: Q, **condition: Any) -> ExpressionWrapper[Any]:
    """Whether a row fulfils the condition; what is unknown does not."""
    wanted = Q(*conditions, **condition)
    return ExpressionWrapper(Coalesce(wanted, False), output_field=BooleanField())


def _fresh(claim: Claim) -> dict[str, Any]:
    """The columns of a row that starts over."""
    operation = claim.operation
    lease = operation.lease
    return {
        "operation": plain(operation.name, 255),
        "fingerprint": operation.fingerprint,
        "status": Status.IN_PROGRESS,
        "attempt": claim.attempt,
        "owner_token": claim.token,
        "lease_expires_at": None if lease is None else DatabaseNow() + lease,
        "hold": operation.hold,
        "response_status": None,
        "response_headers": "[]",
        "response_body": None,
        "error": "",
        "created_at": DatabaseNow(),
        "completed_at": None,
        "replay_count": 0,
        "last_replayed_at": None,
        "principal": plain(operation.principal, 255),
        "method": plain(operation.method, 16),
        "path": plain(operation.path, 2048),
        "caused_by": operation.caused_by,
        **lifetime(operation),
    }


PROMPT: Final = 10
"""A prompt attempt takes less than this fraction of its time to live."""

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
        self._forbid_misplaced(operation)
        if operation.lease is None:
            try:  # by hand, as the hot path: a block of its own is two frames more in a traceback
                claim_or_record = self._acquire(operation)
            except DatabaseFault as error:
                self._raise(error)
            if isinstance(claim_or_record, Claim):
                self._dialect.claimed(claim_or_record)
            return claim_or_record
        self._dialect.begin()
        try:
            with self._translated():
                return self._acquire(operation)
        finally:
            self._dialect.release()  # the lock of the key; others see the row from here on

    def _forbid_misplaced(self, operation: Operation) -> None:
        """Refuse a lease in a transaction, and none outside of one."""
        if operation.lease is not None:
            with self._translated():
                forbid_atomic_block(self.using, f"The claim of {operation.name}")
        elif not connections[self.using].in_atomic_block:
            raise transaction.TransactionManagementError(
                f"The claim of {operation.name} has no lease, so it needs a transaction, but no "
                "transaction is open. Open one with the store's transaction(), or give the "
                "operation a lease."
            )

    def _acquire(self, operation: Operation) -> Claim | Record:
        token, asked_at = new_token(), time.monotonic()
        record_id = self._dialect.claim(operation, token)
        if record_id is not None:
            return Claim(operation, 1, token, record_id, asked_at)
        key, scope = operation.key, operation.scope
        if operation.count_replays and not operation.extend_on_replay:
            row = self._dialect.replay(operation)
            if row is not None:
                return record_of(key, scope, row, counted=True)
        row = self._dialect.read(key, scope)
        if row is None:  # an insert that is not committed yet holds the key
            return in_progress(operation)
        return self._resolved(operation, record_of(key, scope, row))

    def _resolved(self, operation: Operation, record: Record) -> Claim | Record:
        """The record, or a claim where its key is free."""
        is_free = record.expired and not operation.refuse_expired
        if record.status is Status.FAILED or record.interrupted or is_free:
            with transaction.atomic(using=self.using, savepoint=False):
                return take_over(self._dialect, operation, record)
        return record

    def acquire_many(self, operations: Sequence[Operation]) -> Sequence[Claim | Record]:
        for operation in {operation.lease is None: operation for operation in operations}.values():
            self._forbid_misplaced(operation)
        wanted = {(operation.key, operation.scope): operation for operation in reversed(operations)}
        self._dialect.begin()
        try:
            with self._translated():
                found = self._acquire_batch(wanted)
        finally:
            self._dialect.release()  # the locks of the keys with leases; others stay locked
        results: list[Claim | Record] = []
        for operation in operations:
            result = found[operation.key, operation.scope]
            results.append(result)
            if isinstance(result, Claim):  # which the first one gets; for others, it is in progress
                found[operation.key, operation.scope] = in_progress(operation)
                if operation.lease is None:
                    self._dialect.claimed(result)
        return results

    def _acquire_batch(
        self, wanted: Mapping[tuple[str, str], Operation]
    ) -> dict[tuple[str, str], Claim | Record]:
        """Claim operations by key and scope: first what is new, then what is free again."""
        asked_at = time.monotonic()
        # In one order everywhere, so that two batches do not wait for each other.
        tokens = {name: new_token() for name in sorted(wanted)}
        claims = [(wanted[name], token) for name, token in tokens.items()]
        ids = self._dialect.claim_many(claims) if claims else {}
        rest = [name for name, token in tokens.items() if token not in ids]
        rows = self._dialect.read_many(rest) if rest else {}
        found: dict[tuple[str, str], Claim | Record] = {}
        for name, token in tokens.items():
            operation = wanted[name]
            if token in ids:
                found[name] = Claim(operation, 1, token, ids[token], asked_at)
            elif name in rows:
                found[name] = self._resolved(operation, record_of(*name, rows[name]))
            else:  # an insert that is not committed yet holds the key
                found[name] = in_progress(operation)
        return found

    def complete(self, claim: Claim, payload: Payload) -> bool:
        try:  # likewise
            self._refresh_ttl(claim)
            completed = self._dialect.complete(claim, encode(payload))
            self._restore_autocommit(claim, commit=completed)
        except DatabaseFault as error:
            self._raise(error)
        return completed

    def complete_many(self, responses: Sequence[tuple[Claim, Payload]]) -> Sequence[bool]:
        if not responses:
            return []
        with self._translated():
            for claim, _ in responses:
                self._refresh_ttl(claim)
            stored = self._dialect.complete_many([(c, encode(payload)) for c, payload in responses])
            self._restore_autocommit(responses[0][0], commit=bool(stored))
        return [claim.token in stored for claim, _ in responses]

    def _refresh_ttl(self, claim: Claim) -> None:
        """Let the time to live count from now, if a notable part of it is over.

        Not after every attempt: these columns have indexes, which a quick one leaves as they are.
        """
        ttl = claim.operation.ttl
        if ttl is not None and (time.monotonic() - claim.asked_at) * PROMPT > ttl.total_seconds():
            self._mine(claim).update(**lifetime(claim.operation))

    def is_running(self, operation: Operation) -> bool:
        if self._dialect.is_claimed(operation.key, operation.scope):
            return True
        if connections[self.using].needs_rollback:
            return False  # a request's transaction that has met the lock cannot be asked
        try:
            record = self.get(operation.key, operation.scope)
        except (OperationInProgress, StoreUnavailable):
            return False
        return record is not None and record.status is Status.IN_PROGRESS

    def fail(self, claim: Claim, error: str, *, pinned: bool = False, held: bool = False) -> bool:
        with self._translated():
            self._restore_autocommit(claim, commit=False)
            failed = self._mine(claim).update(
                error=plain(error, 4096),
                **(_HELD if held else _FREE),
                **({"pinned": True} if pinned else {}),
            )
        return bool(failed)

    def extend(self, claim: Claim, seconds: float) -> bool:
        [extended] = self._extend(claim, seconds=seconds)
        if extended is None:
            raise OperationInProgress("The record is locked by another transaction.")
        return extended

    def extend_many(self, claims: Sequence[Claim], seconds: float) -> Sequence[bool | None]:
        return self._extend(*claims, seconds=seconds)

    def _extend(self, *claims: Claim, seconds: float) -> Sequence[bool | None]:
        with self._translated():
            renewed = self._dialect.extend(claims, seconds)
            left = [claim for claim in claims if claim.record_id not in renewed]
            locked = self._dialect.owned(left) if left else set()
        return [
            True if claim.record_id in renewed else None if claim.record_id in locked else False
            for claim in claims
        ]

    def steps(self, claim: Claim) -> Sequence[Step]:
        rows = IdempotencyStep.objects.using(self.using).filter(record=claim.record_id)
        columns = ("name", "attempt", "result")
        with self._translated():
            return [Step(**row) for row in rows.order_by("pk").values(*columns)]

    def save_step(self, claim: Claim, step: Step) -> bool:
        with self._translated():
            return self._dialect.save_step(claim, encode_step(step))

    def get(self, key: str, scope: str) -> Record | None:
        with self._translated():
            row = self._dialect.read(key, scope)
        return record_of(key, scope, row) if row else None

    def get_many(self, names: Sequence[tuple[str, str]]) -> Sequence[Record | None]:
        with self._translated():
            rows = self._dialect.read_many(names)
        return [record_of(*name, rows[name]) if name in rows else None for name in names]

    def record_replay(self, record: Record, operation: Operation) -> None:
        self.record_replays([(record, operation)])

    def record_replays(self, replays: Sequence[tuple[Record, Operation]]) -> None:
        alike: dict[object, list[tuple[Record, Operation]]] = {}
        for record, operation in replays:
            if operation.count_replays or operation.extend_on_replay:
                lifetime = operation.extend_on_replay and (operation.ttl, operation.retention)
                alike.setdefault((operation.count_replays, lifetime), []).append(
                    (record, operation)
                )
        for group in alike.values():
            count = partial(self._count_replays, [record for record, _ in group], group[0][1])
            if self._dialect.locks_database:  # as this transaction does; another one would wait
                count()
            else:
                # On its own, so that its row locks are gone at once and its failure fails nothing.
                self.on_commit(count)

    def _count_replays(self, records: Sequence[Record], operation: Operation) -> None:
        changes: dict[str, Any] = {}
        if operation.count_replays:
            changes |= {"replay_count": F("replay_count") + 1, "last_replayed_at": DatabaseNow()}
        if operation.extend_on_replay:
            changes |= lifetime(operation)
        rows = self._rows.filter(pk__in=[record.record_id for record in records])
        try:
            with transaction.atomic(using=self.using):
                if locked := [*unlocked(rows.order_by("pk")).values_list("pk", flat=True)]:
                    self._rows.filter(pk__in=locked).update(**changes)
        except DatabaseFault:
            keys = ", ".join(record.key for record in records)
            logger.warning("A replay of %s was not counted.", keys, exc_info=True)

    def purge(self, older_than: timedelta, limit: int) -> int:
        with transaction.atomic(using=self.using):
            return self._dialect.purge(older_than, limit)

    def purgeable(self, older_than: timedelta) -> int:
        return self._rows.purgeable(older_than).count()

    def check(self) -> Sequence[CheckMessage]:
        return check_database(self.alias, self.using)

    def check_live(self) -> Sequence[CheckMessage]:
        problems = check_writable(self.alias, self.using)
        if sys.argv[1:2] == ["migrate"]:  # which is about to make the tables
            return problems
        return problems or [*check_migrated(self.alias, self.using)]

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
        with StoreTransaction(self._dialect):
            yield
            # Last, so that no request waits for an owner that is paused before it commits.
            with self._translated():
                if not self._dialect.fence(claim):
                    raise ClaimLost

    def is_busy(self, error: BaseException) -> bool:
        return self._dialect.is_busy(error)

    def was_ended_by_server(self, error: BaseException) -> bool:
        return self._dialect.was_ended_by_server(error)

    def on_commit(self, function: Callable[[], object]) -> None:
        transaction.on_commit(function, using=self.using, robust=True)

    def place(self) -> str | None:
        return getattr(connections[self.using], "schema_name", None)  # of django-tenants

    def dedicated_connection(self, place: Hashable) -> AbstractContextManager[None]:
        return unpooled_connection(self.using, schema=place)

    def _restore_autocommit(self, claim: Claim, *, commit: bool) -> None:
        """End the transaction that a leased view left open by leaving autocommit off.

        Its response is stored with it, so that neither is there without the other.

        Args:
            claim: the view's.
            commit: whether to commit what the view has not; else it is rolled back.
        """
        connection = connections[self.using]
        if connection.in_atomic_block or connection.get_autocommit():
            return
        logger.warning(
            "%s left autocommit off on the database %r. Its uncommitted changes were %s. Use "
            "transaction.atomic() in it, or call set_autocommit(True) at its end.",
            claim.operation.name,
            self.using,
            "committed with its result" if commit else "rolled back",
        )
        (connection.commit if commit else connection.rollback)()
        connection.set_autocommit(True)

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
        try:
            raise_translated(self._dialect, error)
        except (StoreUnavailable, OperationInProgress):
            if not connection.in_atomic_block:  # do not leave it broken to the next request
                connection.close_if_unusable_or_obsolete()
            raise
