"""The store in the project's own database: the effect and its answer commit together."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import InterfaceError, OperationalError, connections, transaction
from django.db.models import F, Q

from ..errors import OperationInProgress, StoreUnavailable
from ..models import DatabaseNow, IdempotencyKey, IdempotencyKeyQuerySet
from ..records import Claim, Operation, Payload, Record, Status
from .base import Store
from .database_checks import check_database, check_writable
from .dialects import DIALECTS, Dialect, plain

logger = logging.getLogger("idempotency_django")


class DatabaseStore(Store):
    """Records as rows of :class:`~idempotency_django.models.IdempotencyKey`.

    Args:
        alias: the store's name in ``IDEMPOTENCY["STORES"]``.
        using: the database to keep them in, by its alias in ``DATABASES``. It must be the one that
            the effects are written to, and never a replica: all statements go there, whatever
            the database routers say.
    """

    supports_transactions: ClassVar[bool] = True
    using: str

    def __init__(self, alias: str, *, using: str = "default") -> None:
        super().__init__(alias)
        self.using = using

    def acquire(self, operation: Operation) -> Claim | Record:
        with self._reachable():
            return self._acquire(operation)

    def _acquire(self, operation: Operation) -> Claim | Record:
        token = secrets.token_hex(16)
        record_id = self._dialect.claim(operation, token)
        if record_id is not None:
            return Claim(operation, 1, token, record_id)
        if operation.count_replays and not operation.extend_on_replay:
            row = self._dialect.replay(operation)
            if row is not None:
                return _record(operation.key, operation.scope, row, counted=True)
        found = self.get(operation.key, operation.scope)
        if found is None:  # an insert that is not committed yet holds the key
            return _in_progress(operation)
        if found.status is Status.FAILED or (found.expired and found.status is Status.COMPLETED):
            return self._take_over(operation, found, token)
        return found

    def _take_over(self, operation: Operation, found: Record, token: str) -> Claim | Record:
        """Claim a key whose record is FAILED or expired, unless another contender is faster."""
        rows = self._rows.filter(
            Q(status=Status.FAILED) | Q(status=Status.COMPLETED, expires_at__lte=DatabaseNow()),
            pk=found.record_id,
        )
        features = connections[self.using].features
        row = (
            self._dialect.lockable(rows, operation)
            .select_for_update(skip_locked=features.has_select_for_update_skip_locked)
            .values_list("attempt")
            .first()
        )
        if row is None:
            return _in_progress(operation)
        attempt = row[0] + 1
        self._rows.filter(pk=found.record_id).update(**_fresh(operation, attempt, token))
        return Claim(operation, attempt, token, found.record_id)

    def complete(self, claim: Claim, payload: Payload) -> bool:
        headers = json.dumps(payload.headers) if payload.headers else "[]"
        with self._reachable():
            return self._dialect.complete(claim, payload, headers)

    def fail(self, claim: Claim, error: str) -> bool:
        with self._reachable():
            mine = self._rows.filter(pk=claim.record_id, owner_token=claim.token)
            failed = mine.filter(status=Status.IN_PROGRESS).update(
                status=Status.FAILED,
                error=plain(error, 4096),
                completed_at=DatabaseNow(),
                lease_expires_at=None,
            )
        return bool(failed)

    def get(self, key: str, scope: str) -> Record | None:
        row = self._dialect.select(key, scope)
        return _record(key, scope, row) if row else None

    def record_replay(self, record: Record, operation: Operation) -> None:
        if not (operation.count_replays or operation.extend_on_replay):
            return

        def count() -> None:
            try:
                self._count_replay(record, operation)
            except DatabaseFault:
                logger.warning("A replay of %s was not counted.", record.key, exc_info=True)

        if connections[self.using].vendor == "sqlite":
            count()  # this transaction holds SQLite's one write lock; a later one would wait for it
        else:
            # On its own, so that its row lock is gone at once and its failure fails nothing else.
            transaction.on_commit(count, using=self.using, robust=True)

    def _count_replay(self, record: Record, operation: Operation) -> None:
        changes: dict[str, Any] = {}
        if operation.count_replays:
            changes |= {"replay_count": F("replay_count") + 1, "last_replayed_at": DatabaseNow()}
        if operation.extend_on_replay:
            changes |= _lifetime(operation)
        features = connections[self.using].features
        rows = self._rows.filter(pk=record.record_id)
        with transaction.atomic(using=self.using):
            if rows.select_for_update(
                skip_locked=features.has_select_for_update_skip_locked
            ).exists():
                rows.update(**changes)

    def purge(self, older_than: timedelta, limit: int) -> int:
        return self._rows.purge(older_than, limit)

    def purgeable(self, older_than: timedelta) -> int:
        return self._rows.purgeable(older_than).count()

    @contextmanager
    def transaction(self, *, after: ExitStack | None = None) -> Iterator[None]:
        with ExitStack() as stack:
            # A transaction that is to roll back accepts no statement before its end.
            (after or stack).callback(self._dialect.release)
            with self._reachable():
                stack.enter_context(transaction.atomic(using=self.using, savepoint=after is None))
            yield

    def on_commit(self, function: Callable[[], object]) -> None:
        transaction.on_commit(function, using=self.using, robust=True)

    def check(self) -> Sequence[CheckMessage]:
        return check_database(self.alias, self.using)

    def check_live(self) -> Sequence[CheckMessage]:
        return check_writable(self.alias, self.using)

    @property
    def _rows(self) -> IdempotencyKeyQuerySet:
        return IdempotencyKeyQuerySet(IdempotencyKey, using=self.using)

    @cached_property
    def _dialect(self) -> Dialect:
        vendor = connections[self.using].vendor
        if vendor not in DIALECTS:
            raise ImproperlyConfigured(
                f"DatabaseStore knows {', '.join(DIALECTS)}; the database {self.using!r} is "
                f"{vendor!r}."
            )
        return DIALECTS[vendor](self.using)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Say in the store's own terms what the database says of contention and of its absence."""
        try:
            yield
        except (OperationalError, InterfaceError) as error:
            if self._dialect.is_busy(error):
                raise OperationInProgress from error
            raise StoreUnavailable from error


def _in_progress(operation: Operation) -> Record:
    return Record(key=operation.key, scope=operation.scope, status=Status.IN_PROGRESS)


def _lifetime(operation: Operation) -> dict[str, Any]:
    if operation.ttl is None:
        return {"expires_at": None, "purge_at": None}
    return {
        "expires_at": DatabaseNow() + operation.ttl,
        "purge_at": DatabaseNow() + (operation.ttl + operation.retention),
    }


def _fresh(operation: Operation, attempt: int, token: str) -> dict[str, Any]:
    """The columns of a row that starts over."""
    return {
        "operation": plain(operation.name, 255),
        "fingerprint": operation.fingerprint,
        "status": Status.IN_PROGRESS,
        "attempt": attempt,
        "owner_token": token,
        "lease_expires_at": None,
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
        **_lifetime(operation),
    }


def _record(key: str, scope: str, row: tuple[Any, ...], *, counted: bool = False) -> Record:
    record_id, status, attempt, fingerprint, code, headers, body, expired = row
    payload = None
    if status == Status.COMPLETED:
        pairs = tuple((name, value) for name, value in json.loads(headers))
        payload = Payload(code, pairs, None if body is None else bytes(body))
    return Record(
        key=key,
        scope=scope,
        status=Status(status),
        attempt=attempt,
        fingerprint=fingerprint,
        payload=payload,
        expired=bool(expired),
        counted=counted,
        record_id=record_id,
    )
