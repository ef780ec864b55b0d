"""The store in the project's own database: the effect and its answer commit together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar, Final

from django.core.checks import CheckMessage
from django.db import Error as DatabaseFault
from django.db import connections, transaction

from ...errors import OperationInProgress, StoreUnavailable
from ...models import NO_OWNER, DatabaseNow, IdempotencyKey, IdempotencyKeyQuerySet, IdempotencyStep
from ...records import Claim, Operation, Payload, Record, Status, Step, new_token
from ..codec import decode_step, encode, encode_step
from .batches import acquire_many, get_many
from .checks import check_database, check_migrated, check_writable, lacks_functions
from .dialects import Batching, plain
from .replays import record_replays
from .rows import in_progress, lifetime, record_of
from .takeover import take_over
from .transactional import TransactionalStore
from .transactions import forbid_atomic_block, restore_autocommit

PROMPT: Final = 10
"""An attempt is prompt if it takes less than this fraction of its time to live."""

_FREE: Final = {"status": Status.FAILED, "completed_at": DatabaseNow(), "lease_expires_at": None}
# In progress under a lease that is over, with a token that nobody has.
_HELD: Final = {"hold": True, "lease_expires_at": DatabaseNow(), "owner_token": NO_OWNER}


class DatabaseStore(TransactionalStore):
    """Records as rows of :class:`~idempotency_django.models.IdempotencyKey`.

    Args:
        alias: the store's name in ``IDEMPOTENCY["STORES"]``.
        using: the database to keep them in, by its alias in ``DATABASES``. It must be the one that
            the effects are written to, and never a replica. All statements go there, whatever the
            database routers say.
        combine_statements: whether PostgreSQL gets BEGIN in one message with the claim, and COMMIT
            in one with the answer, where psycopg 3 can do so. Set it to ``False`` behind a pooler
            that reserves a connection for whoever sends several statements in one message, such as
            Amazon RDS Proxy ("pinning").
        functions: whether PostgreSQL claims and completes by the functions that ``migrate`` makes,
            which it need not parse and plan for each request. Without them, it gets plain
            statements.
    """

    supports_steps: ClassVar[bool] = True

    def __init__(
        self,
        alias: str,
        *,
        using: str = "default",
        combine_statements: bool = True,
        functions: bool = True,
    ) -> None:
        super().__init__(alias)
        self.using = using
        self.combine_statements = combine_statements
        self.functions = functions

    def acquire(self, operation: Operation) -> Claim | Record:
        if operation.lease is None:
            if not connections[self.using].in_atomic_block:
                self._forbid_misplaced(operation)
            try:
                claim_or_record = self._acquire(operation)
            except DatabaseFault as error:
                self._raise(error)
            if isinstance(claim_or_record, Claim):
                self._dialect.claimed(claim_or_record)
            return claim_or_record
        self._forbid_misplaced(operation)
        self._dialect.begin()
        try:
            with self._on_its_own():
                return self._acquire(operation)
        finally:
            self._dialect.release()  # what locked the key; others see the row from here on

    def _forbid_misplaced(self, operation: Operation) -> None:
        """Refuse a lease in a transaction, and none outside of one."""
        if operation.lease is not None:
            with self._on_its_own():
                forbid_atomic_block(self.using, f"The claim of {operation.name}")
        elif not connections[self.using].in_atomic_block:
            raise transaction.TransactionManagementError(
                f"The claim of {operation.name} has no lease, so a transaction must hold it, "
                "but no transaction is open: nobody could ever take it over. Open one with "
                "the store's transaction(), or give the operation a lease."
            )

    def _acquire(self, operation: Operation) -> Claim | Record:
        token, asked_at = new_token(), time.monotonic()
        acquired = self._dialect.acquire(operation, token)
        if isinstance(acquired, int):
            return Claim(operation, 1, token, acquired, asked_at)
        if acquired is None:  # an insert that is not committed yet holds the key
            return in_progress(operation)
        columns, counted = acquired
        record = record_of(operation.key, operation.scope, columns, counted=counted)
        return record if counted else self._resolved(operation, record)

    def _resolved(self, operation: Operation, record: Record) -> Claim | Record:
        """The record, or a claim where its key is free."""
        if record.status is Status.FAILED or record.interrupted or record.expired:
            with transaction.atomic(using=self.using, savepoint=False):
                return take_over(self._dialect, operation, record)
        return record

    def acquire_many(self, operations: Sequence[Operation]) -> Sequence[Claim | Record]:
        dialect = self._dialect
        if not (operations and isinstance(dialect, Batching)):
            return super().acquire_many(operations)
        for operation in {operation.lease is None: operation for operation in operations}.values():
            self._forbid_misplaced(operation)
        with self._on_its_own():
            claims_and_records = acquire_many(dialect, operations, time.monotonic(), self._resolved)
        for claim in claims_and_records:
            if isinstance(claim, Claim) and claim.operation.lease is None:
                dialect.claimed(claim)
        return claims_and_records

    def complete_many(self, answers: Sequence[tuple[Claim, Payload]]) -> Sequence[bool]:
        dialect = self._dialect
        if not (answers and isinstance(dialect, Batching)):
            return super().complete_many(answers)
        return self._complete_many(dialect, answers)

    def _complete_many(
        self, dialect: Batching, answers: Sequence[tuple[Claim, Payload]]
    ) -> Sequence[bool]:
        with self._on_its_own():
            for claim, _ in answers:
                if took_long(claim):
                    self._prolong(claim)
            stored = dialect.complete_many([(c, encode(payload)) for c, payload in answers])
            if not connections[self.using].in_atomic_block:
                self._restore_autocommit(answers[0][0], commit=bool(stored))
        return [claim.token in stored for claim, _ in answers]

    def _prolong(self, claim: Claim) -> None:
        """Let the time to live of a claim's record count from now."""
        mine = self._rows.filter(pk=claim.record_id, owner_token=claim.token)
        mine.filter(status=Status.IN_PROGRESS).update(**lifetime(claim.operation))

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

    def complete(self, claim: Claim, payload: Payload) -> bool:
        try:
            if took_long(claim):
                self._prolong(claim)
            answer = encode(payload)
            given = {
                "code": answer.status,
                "headers": answer.headers,
                "body": answer.body,
                "id": claim.record_id,
                "token": claim.token,
            }
            completed = self._dialect.complete(claim, given)
            if not connections[self.using].in_atomic_block:
                self._restore_autocommit(claim, commit=completed)
        except DatabaseFault as error:
            self._raise_on_its_own(error)
        return completed

    def fail(self, claim: Claim, error: str, *, pinned: bool = False, held: bool = False) -> bool:
        with self._on_its_own():
            self._restore_autocommit(claim, commit=False)
            mine = self._rows.filter(pk=claim.record_id, owner_token=claim.token)
            failed = mine.filter(status=Status.IN_PROGRESS).update(
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
        with self._on_its_own():
            renewed = self._dialect.extend(claims, seconds)
            left = [claim for claim in claims if claim.record_id not in renewed]
            locked = self._dialect.owned(left) if left else set()
        return [
            True if claim.record_id in renewed else None if claim.record_id in locked else False
            for claim in claims
        ]

    def steps(self, claim: Claim) -> Sequence[Step]:
        rows = IdempotencyStep.objects.using(self.using).filter(record=claim.record_id)
        with self._on_its_own():
            columns = ("position", "name", "attempt", "result", "failure")
            return [decode_step(*row) for row in rows.order_by("position").values_list(*columns)]

    def save_step(self, claim: Claim, step: Step) -> bool:
        with self._reachable():
            return self._dialect.save_step(claim, step, encode_step(step))

    def get(self, key: str, scope: str) -> Record | None:
        with self._on_its_own():
            row = self._dialect.read(key, scope)
        return record_of(key, scope, row) if row else None

    def get_many(self, names: Sequence[tuple[str, str]]) -> Sequence[Record | None]:
        with self._on_its_own():
            return get_many(self._dialect, names)

    def record_replay(self, record: Record, operation: Operation) -> None:
        record_replays(self._rows, [(record, operation)])

    def record_replays(self, replays: Sequence[tuple[Record, Operation]]) -> None:
        record_replays(self._rows, replays)

    def purge(self, older_than: timedelta, limit: int) -> int:
        with transaction.atomic(using=self.using):
            return self._dialect.purge(older_than, limit)

    def purgeable(self, older_than: timedelta) -> int:
        return self._rows.purgeable(older_than).count()

    def check(self) -> Sequence[CheckMessage]:
        return check_database(self.alias, self.using)

    def check_live(self) -> Sequence[CheckMessage]:
        return (
            check_writable(self.alias, self.using)
            or [*check_migrated(self.alias, self.using)]
            or self._check_functions()
        )

    def _check_functions(self) -> Sequence[CheckMessage]:
        return [lacks_functions(self.alias, self.using)] if self._dialect.lacks_functions() else []

    @property
    def _rows(self) -> IdempotencyKeyQuerySet:
        return IdempotencyKeyQuerySet(IdempotencyKey, using=self.using)

    def _restore_autocommit(self, claim: Claim, *, commit: bool) -> None:
        connection = connections[self.using]
        if not (connection.in_atomic_block or connection.get_autocommit()):
            restore_autocommit(self.using, claim.operation.name, commit=commit)


def took_long(claim: Claim) -> bool:
    """Whether so much of its time to live is over that the answer must get a new one.

    Not after every attempt: these columns have indexes, which a quick one leaves as they are.
    """
    ttl = claim.operation.ttl
    return ttl is not None and (time.monotonic() - claim.asked_at) * PROMPT > ttl.total_seconds()
