"""PostgreSQL, through psycopg 3 or psycopg2."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Final

from django.db import Error as DatabaseFault
from django.db import connections, models
from django.db.models import BooleanField, Func, QuerySet, Value

from ....models import IdempotencyKey
from ....records import Claim, Operation
from .base import Dialect
from .batches import Batching, claim_values
from .joining import LOST
from .messages import CombinedMessages, Messages
from .statements import Parameters
from .values import ids_of, lock_number, tokens_of

_ONE_BY_ONE: Final = Messages()


class PostgreSQL(Batching):
    """The lock is a transaction-scoped advisory lock, taken inside the INSERT itself.

    It is safe behind PgBouncer in transaction mode and gone when the connection dies. Whoever
    does not get it does not touch the unique index either, where it would have to wait.
    """

    vendor = "postgresql"
    combines = True
    # libpq's PGTransactionStatusType: 0 is connected, and in no transaction.
    in_transaction = attrgetter("info.transaction_status")
    # lock_not_available, serialization_failure, deadlock_detected
    busy = frozenset({"55P03", "40001", "40P01"})
    read_only = frozenset({"25006"})  # read_only_sql_transaction
    missing = frozenset({"42P01", "42703"})  # undefined_table, undefined_column
    ends = Dialect.ends + r"|ABORT|PREPARE\s+TRANSACTION"
    aside = (
        r"(?<!\w)[eE]'(?:[^'\\]|\\(?s:.))*+(?:'|\\?\Z)|'[^']*+(?:'|\Z)|\"[^\"]*+(?:\"|\Z)|"
        r"(?<![\w$])\$(\w*)\$(?s:.*?)(?:\$\1\$|\Z)|--[^\n]*|/\*(?s:.*?)(?:\*/|\Z)"
    )

    def __init__(self, using: str, *, combine: bool = True) -> None:
        super().__init__(using, combine=combine)
        self._local = threading.local()

    def purged(self, cursor: Any, given: Parameters) -> int:
        cursor.execute(self.sql["purge"], given)
        ids = [row[0] for row in cursor.fetchall()]
        cursor.execute(self.sql["purge_steps"], {"ids": ids})
        return len(ids)

    def messages(self) -> CombinedMessages | None:
        connection = connections[self.using]
        if not self.combine or connection.in_atomic_block:
            return None
        messages = self._local.messages = CombinedMessages(connection, self._is_lost)
        return messages

    def _messages(self) -> Messages:
        messages: CombinedMessages | None = getattr(self._local, "messages", None)
        return _ONE_BY_ONE if messages is None or messages.over else messages

    def beginning(self) -> AbstractContextManager[None]:
        return self._messages().beginning()

    def claimed(self, claim: Claim) -> None:
        self._messages().claimed(claim)

    def claim(self, operation: Operation, token: str) -> int | None:
        given = claim_values(operation, token)
        with connections[self.using].cursor() as cursor, self.beginning():
            cursor.execute(self.sql["claim"], given)
            row = cursor.fetchone()
            return row[0] if row else None

    def write(self, claim: Claim, sql: str, given: Parameters) -> bool:
        return self._messages().keep(claim, sql, given) or super().write(claim, sql, given)

    def write_fence(self, sql: str, given: Parameters) -> bool:
        return self._messages().keep_fenced(sql, given) or super().write_fence(sql, given)

    def _is_lost(self, error: DatabaseFault) -> bool:
        return LOST in str(error)

    def lockable(
        self, rows: QuerySet[IdempotencyKey], operation: Operation
    ) -> QuerySet[IdempotencyKey]:
        # A row may only be taken over under its key's lock: an INSERT of somebody who had the
        # lock while the row is being updated here would wait for this transaction to end.
        lock = Func(
            Value(lock_number(operation), output_field=models.BigIntegerField()),
            function="pg_try_advisory_xact_lock",
            output_field=BooleanField(),
        )
        return rows.filter(lock)

    def extend(self, claims: Sequence[Claim], seconds: float) -> set[int]:
        return self._ids("extend", claims, seconds=seconds)

    def owned(self, claims: Sequence[Claim]) -> set[int]:
        return self._ids("owned", claims)

    def _ids(self, statement: str, claims: Sequence[Claim], **given: Any) -> set[int]:
        given |= {"ids": ids_of(claims), "tokens": tokens_of(claims)}
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.sql[statement], given)
            return {row[0] for row in cursor.fetchall()}

    def code(self, error: BaseException | None) -> object:
        return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)

    def replay(self, operation: Operation) -> tuple[Any, ...] | None:
        connection = connections[self.using]
        # Where the transaction is somebody else's, other things are in it.
        blocks = len(connection.atomic_blocks)
        ours = connection.get_autocommit() if not blocks else connection.commit_on_exit
        ours = ours and blocks <= 1
        statement = "replay_relaxed" if ours else "replay"
        given: Parameters = {
            "key": operation.key,
            "scope": operation.scope,
            "fingerprint": operation.fingerprint,
            "lock": lock_number(operation),
        }
        messages = self._messages()
        with connection.cursor() as cursor, messages.counting():
            cursor.execute(self.sql[statement], given)
            values = cursor.fetchone()
        if values is None:
            return None
        *row, last_replayed_at = values
        before = {"last_replayed_at": last_replayed_at, "id": row[0]}
        messages.counted(self.sql["uncount_replay"], before)
        return tuple(row)
