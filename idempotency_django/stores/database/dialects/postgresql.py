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
from ....records import Claim, Operation, Status
from .base import Dialect
from .batches import Batching
from .messages import LOST, CombinedMessages, Messages
from .values import ids_of, lock_number, tokens_of, values_of

_ONE_BY_ONE: Final = Messages()


class PostgreSQL(Batching):
    """The lock is a transaction-scoped advisory lock, taken inside the INSERT itself.

    It is safe behind PgBouncer in transaction mode and gone when the connection dies. Whoever
    does not get it does not touch the unique index either, where it would have to wait.
    """

    combines = True
    # libpq's PGTransactionStatusType: 0 is connected, and in no transaction.
    in_transaction = attrgetter("info.transaction_status")
    now = "STATEMENT_TIMESTAMP()"
    later = "STATEMENT_TIMESTAMP() + %s::double precision * INTERVAL '1 second'"
    left = "EXTRACT(EPOCH FROM {lease_expires_at} - STATEMENT_TIMESTAMP())::double precision"
    insert = (
        "INSERT INTO {table} ({columns}) SELECT {values} WHERE pg_try_advisory_xact_lock(%s) "
        "ON CONFLICT ({key}, {scope}) DO NOTHING RETURNING {id}"
    )
    returning = " RETURNING {id}"
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
        self.replay_sql = self._replay_sql(self.names)
        self.uncount_sql = self._uncount_sql(self.names)
        self._local = threading.local()

    # The batch is chosen once. IN would make it a join, which may read the whole table. The steps
    # go in a statement of their own: what a late owner has added until its record was locked is
    # seen by then.
    purge_records = "DELETE FROM {table} WHERE id = ANY (ARRAY({batch})) RETURNING id"
    purge_steps = "DELETE FROM {steps} WHERE record_id = ANY (%s)"

    def purge(self, batch: QuerySet[IdempotencyKey, Any]) -> int:
        chosen, parameters = batch.query.get_compiler(self.using).as_sql()
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.purge_records.format(batch=chosen, **self.names), parameters)
            gone = [row[0] for row in cursor.fetchall()]
            cursor.execute(self.purge_steps.format(**self.names), [gone])
        return len(gone)

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
        with connections[self.using].cursor() as cursor, self.beginning():
            cursor.execute(self.insert_sql, [*values_of(operation, token), lock_number(operation)])
            row = cursor.fetchone()
            return row[0] if row else None

    def write(self, claim: Claim, sql: str, parameters: Sequence[Any]) -> bool:
        kept = self._messages().keep(claim, sql, parameters)
        return kept or super().write(claim, sql, parameters)

    def fence(self, claim: Claim) -> bool:
        kept = self._messages().keep_fenced(self.fence_sql, (claim.record_id, claim.token))
        return kept or super().fence(claim)

    def write_step(self, sql: str, parameters: Sequence[Any]) -> bool:
        return self._messages().keep_fenced(sql, parameters) or super().write_step(sql, parameters)

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

    def _extend_sql(self) -> tuple[str, str]:
        names = self.names
        mine = (
            f"SELECT {names['id']} FROM {names['table']} WHERE {names['id']} = ANY (%s) "
            f"AND {names['owner_token']} = ANY (%s) AND {self._in_progress()}"
        )
        # The rows are chosen once. IN would make it a join, which may read the whole table.
        update = (
            f"UPDATE {names['table']} SET {names['lease_expires_at']} = {self.later} "
            f"WHERE {names['id']} = ANY (ARRAY({mine} FOR UPDATE SKIP LOCKED)) "
            f"RETURNING {names['id']}"
        )
        return update, mine

    def extend(self, claims: Sequence[Claim], seconds: float) -> set[int]:
        return self._ids(self.extend_sql, [seconds, ids_of(claims), tokens_of(claims)])

    def owned(self, claims: Sequence[Claim]) -> set[int]:
        return self._ids(self.owned_sql, [ids_of(claims), tokens_of(claims)])

    def _ids(self, sql: str, parameters: list[Any]) -> set[int]:
        with connections[self.using].cursor() as cursor:
            cursor.execute(sql, parameters)
            return {row[0] for row in cursor.fetchall()}

    def code(self, error: BaseException | None) -> object:
        return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)

    def replay(self, operation: Operation) -> tuple[Any, ...] | None:
        connection = connections[self.using]
        # Nobody is hurt when a crash forgets a count, so its commit need not wait for the disk;
        # where the transaction is somebody else's, other things are in it.
        blocks = len(connection.atomic_blocks)
        ours = connection.get_autocommit() if not blocks else connection.commit_on_exit
        ours = ours and blocks <= 1
        commit = "off" if ours else "on"
        messages = self._messages()
        with connection.cursor() as cursor, messages.counting():
            cursor.execute(
                self.replay_sql[commit],
                [
                    operation.key,
                    operation.scope,
                    operation.fingerprint,
                    lock_number(operation),
                ],
            )
            found = cursor.fetchone()
        if found is None:
            return None
        *row, last_replayed_at = found
        messages.counted(self.uncount_sql, (last_replayed_at, row[0]))
        return tuple(row)

    def _uncount_sql(self, names: dict[str, str]) -> str:
        return (
            f"UPDATE {names['table']} SET {names['replay_count']} = {names['replay_count']} - 1, "
            f"{names['last_replayed_at']} = %s "
            f"WHERE {names['id']} = %s AND {names['replay_count']} > 0"
        )

    def _replay_sql(self, names: dict[str, str]) -> dict[str, str]:
        # Under the key's lock, like whatever holds a row until the transaction ends; and past a
        # row that somebody has locked without it, an operator say.
        update = (
            f"UPDATE {names['table']} SET {names['replay_count']} = {names['replay_count']} + 1, "
            f"{names['last_replayed_at']} = {self.now} WHERE {names['id']} = ("
            f"SELECT {names['id']} FROM {names['table']} "
            f"WHERE {names['key']} = %s AND {names['scope']} = %s "
            f"AND {names['fingerprint']} = %s AND {names['status']} = '{Status.COMPLETED}' "
            f"AND ({names['expires_at']} > {self.now} OR {names['expires_at']} IS NULL) "
            "AND pg_try_advisory_xact_lock(%s){relaxed} FOR UPDATE SKIP LOCKED) "
            # As it was before: a statement does not see what it has changed.
            f"RETURNING {names['selected']}, FALSE, FALSE, FALSE, NULL, "
            f"(SELECT before.{names['last_replayed_at']} FROM {names['table']} before "
            f"WHERE before.{names['id']} = {names['table']}.{names['id']})"
        )
        relaxed = " AND set_config('synchronous_commit', 'off', true) = 'off'"
        return {"on": update.format(relaxed=""), "off": update.format(relaxed=relaxed)}
