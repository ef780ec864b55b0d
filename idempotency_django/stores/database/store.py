"""The store in the project's own database: the effect and its answer commit together."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import cached_property
from typing import ClassVar, Final

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import InterfaceError, OperationalError, connections, transaction

from ...errors import ClaimLost, IdempotencyError, OperationInProgress, StoreUnavailable
from ...models import DatabaseNow, IdempotencyKey, IdempotencyKeyQuerySet, IdempotencyStep
from ...records import Claim, Operation, Payload, Record, Status, Step
from ..atomic_blocks import outside_pools
from ..base import Store
from ..codec import decode_step, encode, encode_step
from .checks import check_database, check_migrated, check_writable
from .dialects import DIALECTS, Dialect, plain
from .faults import raise_translated
from .replays import record_replay
from .rows import in_progress, lifetime, record_of, took_long
from .takeover import take_over
from .transactions import forbid_atomic_block, restore_autocommit, unbroken, without_autocommit

logger = logging.getLogger("idempotency_django")

UNCONFIRMED_MESSAGE: Final = (
    "The database did not confirm the commit of the operation, so nobody knows whether it was "
    "committed. Retry later with the same key: the retry gets the answer, or executes the "
    "operation."
)

_REFUSED: Final = (
    "The database could not commit because of a conflict with another transaction, and has "
    "rolled back. Retry later with the same key."
)


class DatabaseStore(Store):
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
    """

    supports_transactions: ClassVar[bool] = True
    supports_steps: ClassVar[bool] = True
    using: str

    def __init__(
        self, alias: str, *, using: str = "default", combine_statements: bool = True
    ) -> None:
        super().__init__(alias)
        self.using = using
        self.combine_statements = combine_statements

    def acquire(self, operation: Operation) -> Claim | Record:
        if operation.lease is None:
            if not connections[self.using].in_atomic_block:
                raise transaction.TransactionManagementError(
                    f"The claim of {operation.name} has no lease, so a transaction must hold it, "
                    "but no transaction is open: nobody could ever take it over. Open one with "
                    "the store's transaction(), or give the operation a lease."
                )
            with self._reachable():
                found = self._acquire(operation)
            if isinstance(found, Claim):
                self._dialect.claimed(found)
            return found
        with self._on_its_own():
            forbid_atomic_block(self.using, f"The claim of {operation.name}")
        self._dialect.begin()
        try:
            with self._on_its_own():
                return self._acquire(operation)
        finally:
            self._dialect.release()  # what locked the key; others see the row from here on

    def _acquire(self, operation: Operation) -> Claim | Record:
        token, asked = secrets.token_hex(16), time.monotonic()
        record_id = self._dialect.claim(operation, token)
        if record_id is not None:
            return Claim(operation, 1, token, record_id, asked)
        if operation.count_replays and not operation.extend_on_replay:
            row = self._dialect.replay(operation)
            if row is not None:
                return record_of(operation.key, operation.scope, row, counted=True)
        found = self.get(operation.key, operation.scope)
        if found is None:  # an insert that is not committed yet holds the key
            return in_progress(operation)
        if found.status is Status.FAILED or found.interrupted or found.expired:
            with transaction.atomic(using=self.using, savepoint=False):
                return take_over(self._dialect, operation, found, token)
        return found

    def complete(self, claim: Claim, payload: Payload) -> bool:
        with self._on_its_own():
            if took_long(claim):
                mine = self._rows.filter(pk=claim.record_id, owner_token=claim.token)
                mine.filter(status=Status.IN_PROGRESS).update(**lifetime(claim.operation))
            completed = self._dialect.complete(claim, encode(payload))
            self._restore_autocommit(claim, commit=completed)
            return completed

    def fail(self, claim: Claim, error: str, *, pinned: bool = False) -> bool:
        with self._on_its_own():
            self._restore_autocommit(claim, commit=False)
            mine = self._rows.filter(pk=claim.record_id, owner_token=claim.token)
            failed = mine.filter(status=Status.IN_PROGRESS).update(
                status=Status.FAILED,
                error=plain(error, 4096),
                completed_at=DatabaseNow(),
                lease_expires_at=None,
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

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        with outside_pools(self.using):
            yield

    def steps(self, claim: Claim) -> Sequence[Step]:
        rows = IdempotencyStep.objects.using(self.using).filter(record=claim.record_id)
        with self._on_its_own():
            columns = ("position", "name", "attempt", "result", "failure")
            return [decode_step(*row) for row in rows.order_by("position").values_list(*columns)]

    def save_step(self, claim: Claim, step: Step) -> bool:
        with self._reachable():
            return self._dialect.save_step(claim, step, encode_step(step))

    def unbroken(self, what: str) -> AbstractContextManager[None]:
        return unbroken(self._dialect, what)

    @contextmanager
    def durable(self, what: str) -> Iterator[None]:
        with self._on_its_own():
            forbid_atomic_block(self.using, what)
        with self._transaction():
            yield

    @contextmanager
    def fenced(self, claim: Claim) -> Iterator[None]:
        with self._transaction():
            yield
            # Last, so that nobody waits for an owner that is paused before it commits.
            with self._reachable():
                if not self._dialect.fence(claim):
                    raise ClaimLost

    @contextmanager
    def _transaction(self, *, savepoint: bool = True, whole: bool = False) -> Iterator[None]:
        """A transaction whose begin and commit raise the store's own errors.

        ``whole``: it holds all that was done. What a part of an operation has done elsewhere is
        not undone with it, so that one has never failed for certain.
        """
        with ExitStack() as stack:
            messages = stack.enter_context(self._dialect.messages())
            with self._reachable():
                stack.enter_context(transaction.atomic(using=self.using, savepoint=savepoint))
            connection = connections[self.using]
            # Whoever has turned autocommit off by hand commits by hand.
            if not (connection.commit_on_exit or connection.settings_dict["AUTOCOMMIT"]):
                raise without_autocommit(self.using)
            committed: list[bool] = []
            if len(connections[self.using].atomic_blocks) == 1:  # within others, no hook runs here
                self.on_commit(lambda: committed.append(True))  # the first of all hooks
            yield
            try:
                lost = not messages.commit()
                if not lost:
                    stack.close()
            except IdempotencyError as error:  # a hook's, after the commit
                error.foreign = True
                raise
            except DatabaseFault as error:
                if committed:  # another hook has raised it
                    raise
                if whole and self._dialect.is_busy(error):
                    raise OperationInProgress(_REFUSED) from error
                if messages.stopped_before_commit:
                    raise_translated(self._dialect, error, rolled_back=True)
                if not isinstance(error, OperationalError | InterfaceError):
                    raise
                raise StoreUnavailable(UNCONFIRMED_MESSAGE) from error
            if lost:
                raise ClaimLost

    def get(self, key: str, scope: str) -> Record | None:
        with self._on_its_own():
            row = self._dialect.select(key, scope)
        return record_of(key, scope, row) if row else None

    def record_replay(self, record: Record, operation: Operation) -> None:
        if operation.count_replays or operation.extend_on_replay:
            record_replay(self._rows.filter(pk=record.record_id), record.key, operation)

    def purge(self, older_than: timedelta, limit: int) -> int:
        return self._rows.purge(older_than, limit)

    def purgeable(self, older_than: timedelta) -> int:
        return self._rows.purgeable(older_than).count()

    @contextmanager
    def transaction(self, *, after: ExitStack | None = None) -> Iterator[None]:
        with ExitStack() as stack:
            # A transaction that is to roll back accepts no statement before its end.
            (after or stack).callback(self._dialect.release)
            self._dialect.begin()
            with self._transaction(savepoint=after is None, whole=True):
                yield

    def is_busy(self, error: BaseException) -> bool:
        return self._dialect.is_busy(error)

    def on_commit(self, function: Callable[[], object]) -> None:
        transaction.on_commit(function, using=self.using, robust=True)

    def check(self) -> Sequence[CheckMessage]:
        return check_database(self.alias, self.using)

    def check_live(self) -> Sequence[CheckMessage]:
        read_only = check_writable(self.alias, self.using)
        return read_only or [*check_migrated(self.alias, self.using)]

    @property
    def _rows(self) -> IdempotencyKeyQuerySet:
        return IdempotencyKeyQuerySet(IdempotencyKey, using=self.using)

    @cached_property
    def _dialect(self) -> Dialect:
        vendor = connections[self.using].vendor
        if vendor not in DIALECTS:
            raise ImproperlyConfigured(
                f"DatabaseStore supports {', '.join(DIALECTS)}; the database {self.using!r} is "
                f"{vendor!r}."
            )
        return DIALECTS[vendor](self.using, combine=self.combine_statements)

    @contextmanager
    def _on_its_own(self) -> Iterator[None]:
        """Outside a transaction: do not leave a broken connection to the next request."""
        connection = connections[self.using]
        try:
            with self._reachable():
                yield
        except (StoreUnavailable, OperationInProgress):
            if not connection.in_atomic_block:
                connection.close_if_unusable_or_obsolete()
            raise

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Translate the database's errors of contention or connection into the store's."""
        try:
            yield
        except DatabaseFault as error:
            raise_translated(self._dialect, error)

    def _restore_autocommit(self, claim: Claim, *, commit: bool) -> None:
        connection = connections[self.using]
        if not (connection.in_atomic_block or connection.get_autocommit()):
            restore_autocommit(self.using, claim.operation.name, commit=commit)
