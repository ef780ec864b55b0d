"""What differs between databases on the hot path: how a key is locked, and the SQL.

The statements are composed once per kind of database from the model's own metadata, as Django's
database cache backend does: building them through the ORM for each request would take longer than
running them. The unique index is what makes two owners impossible everywhere; the lock is what
tells a duplicate at once that it is one, where the index alone would make it wait.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, ClassVar

from django.db import Error as DatabaseFault
from django.db import IntegrityError, OperationalError, connections, models
from django.db.models import BooleanField, Func, QuerySet, Value

from ..models import IdempotencyKey
from ..records import Claim, Operation, Payload, Status

_INSERTED = (
    "key scope operation fingerprint status attempt owner_token response_headers error "
    "replay_count principal method path created_at expires_at purge_at"
).split()
_SELECTED = ("id status attempt fingerprint response_status response_headers response_body").split()


class Dialect(ABC):
    """The hot path's SQL for one kind of database."""

    now: ClassVar[str]
    later: ClassVar[str]
    """``now`` plus a parameter of seconds; NULL stays NULL."""
    insert: ClassVar[str] = "INSERT INTO {table} ({columns}) VALUES ({values})"
    busy: ClassVar[frozenset[object]]
    """The error codes that say: somebody else is at it."""

    def __init__(self, using: str) -> None:
        self.using = using
        quote = connections[using].ops.quote_name
        meta = IdempotencyKey._meta
        names = {
            "table": quote(meta.db_table),
            **{field.name: quote(str(field.column)) for field in meta.concrete_fields},
        }
        names["selected"] = ", ".join(names[name] for name in _SELECTED)
        self.names = names
        self.insert_sql = self.insert.format(
            columns=", ".join(names[name] for name in _INSERTED),
            values=", ".join(["%s"] * (len(_INSERTED) - 3) + [self.now, self.later, self.later]),
            **names,
        )
        self.select_sql = (
            f"SELECT {names['selected']}, {names['expires_at']} <= {self.now} "
            f"FROM {names['table']} "
            f"WHERE {names['key']} = %s AND {names['scope']} = %s"
        )
        self.complete_sql = (
            f"UPDATE {names['table']} SET {names['status']} = '{Status.COMPLETED}', "
            f"{names['response_status']} = %s, {names['response_headers']} = %s, "
            f"{names['response_body']} = %s, {names['completed_at']} = {self.now}, "
            f"{names['lease_expires_at']} = NULL "
            f"WHERE {names['id']} = %s AND {names['owner_token']} = %s"
        )

    @abstractmethod
    def claim(self, operation: Operation, token: str) -> int | None:
        """Insert the operation's row and lock its key; ``None`` where either cannot be had now."""

    def lockable(
        self, rows: QuerySet[IdempotencyKey], operation: Operation
    ) -> QuerySet[IdempotencyKey]:
        """The rows, narrowed to nothing when the operation's key is locked by somebody else."""
        return rows

    def release(self) -> None:
        """Free what the end of the transaction does not free."""

    def complete(self, claim: Claim, payload: Payload, headers: str) -> bool:
        with connections[self.using].cursor() as cursor:
            cursor.execute(
                self.complete_sql,
                [payload.status, headers, payload.body, claim.record_id, claim.token],
            )
            return bool(cursor.rowcount)

    def select(self, key: str, scope: str) -> tuple[Any, ...] | None:
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.select_sql, [key, scope])
            row: tuple[Any, ...] | None = cursor.fetchone()
            return row

    def is_busy(self, error: BaseException) -> bool:
        """Whether a database error says that somebody else is at it, rather than a fault."""
        return self.code(error.__cause__) in self.busy

    @abstractmethod
    def code(self, error: BaseException | None) -> object:
        """The driver's code of an error."""

    def replay(self, operation: Operation) -> tuple[Any, ...] | None:
        """Count a replay of the operation and select it, in one statement where there is one.

        ``None``: it is not completed, expired, a different request, or locked.
        """
        return None

    @staticmethod
    def values(operation: Operation, token: str) -> list[Any]:
        """The parameters of ``insert_sql``, in the order of its columns."""
        ttl = None if operation.ttl is None else operation.ttl.total_seconds()
        kept = None if ttl is None else ttl + operation.retention.total_seconds()
        return [
            operation.key,
            operation.scope,
            plain(operation.name, 255),
            operation.fingerprint,
            Status.IN_PROGRESS.value,
            1,
            token,
            "[]",
            "",
            0,
            plain(operation.principal, 255),
            plain(operation.method, 16),
            plain(operation.path, 2048),
            ttl,
            kept,
        ]


def plain(text: str, limit: int) -> str:
    """The text, cut to a column's length and rid of what a database refuses (NUL, surrogates)."""
    return (
        text[:limit].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
    )


def _lock_digest(operation: Operation, size: int) -> bytes:
    name = f"idempotency_django:{len(operation.key)}:{operation.key}{operation.scope}"
    return hashlib.blake2b(name.encode(), digest_size=size).digest()


class PostgreSQL(Dialect):
    """The lock is a transaction-scoped advisory lock, taken inside the INSERT itself.

    It is safe behind PgBouncer in transaction mode and gone when the connection dies. Whoever
    does not get it does not touch the unique index either, where it would have to wait.
    """

    now = "STATEMENT_TIMESTAMP()"
    later = "STATEMENT_TIMESTAMP() + %s::double precision * INTERVAL '1 second'"
    insert = (
        "INSERT INTO {table} ({columns}) SELECT {values} WHERE pg_try_advisory_xact_lock(%s) "
        "ON CONFLICT ({key}, {scope}) DO NOTHING RETURNING {id}"
    )
    # lock_not_available, serialization_failure, deadlock_detected
    busy = frozenset({"55P03", "40001", "40P01"})

    def __init__(self, using: str) -> None:
        super().__init__(using)
        self.replay_sql = self._replay_sql(self.names)

    def claim(self, operation: Operation, token: str) -> int | None:
        with connections[self.using].cursor() as cursor:
            cursor.execute(
                self.insert_sql, [*self.values(operation, token), self._lock_number(operation)]
            )
            row = cursor.fetchone()
            return row[0] if row else None

    def lockable(
        self, rows: QuerySet[IdempotencyKey], operation: Operation
    ) -> QuerySet[IdempotencyKey]:
        # A row may only be taken over under its key's lock: an INSERT of somebody who had the
        # lock while the row is being updated here would wait for this transaction to end.
        lock = Func(
            Value(self._lock_number(operation), output_field=models.BigIntegerField()),
            function="pg_try_advisory_xact_lock",
            output_field=BooleanField(),
        )
        return rows.filter(lock)

    def code(self, error: BaseException | None) -> object:
        return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)

    @staticmethod
    def _lock_number(operation: Operation) -> int:
        return int.from_bytes(_lock_digest(operation, 8), signed=True)

    def replay(self, operation: Operation) -> tuple[Any, ...] | None:
        connection = connections[self.using]
        # Nobody is hurt when a crash forgets a count, so its commit need not wait for the disk;
        # where the transaction is somebody else's, other things are in it.
        commit = "off" if len(connection.atomic_blocks) == 1 else "on"
        with connection.cursor() as cursor:
            cursor.execute(
                self.replay_sql[commit],
                [
                    operation.key,
                    operation.scope,
                    operation.fingerprint,
                    self._lock_number(operation),
                ],
            )
            row: tuple[Any, ...] | None = cursor.fetchone()
            return row

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
            f"RETURNING {names['selected']}, FALSE"
        )
        relaxed = " AND set_config('synchronous_commit', 'off', true) = 'off'"
        return {"on": update.format(relaxed=""), "off": update.format(relaxed=relaxed)}


class MySQL(Dialect):
    """The lock is a named one of the session, taken before the INSERT and released after COMMIT.

    The INSERT looks before it touches the unique index: a row that somebody has locked, a purge or
    the count of a replay, would make it wait.
    """

    now = "UTC_TIMESTAMP(6)"
    later = "UTC_TIMESTAMP(6) + INTERVAL %s SECOND"
    insert = (
        "INSERT INTO {table} ({columns}) SELECT {values} FROM DUAL WHERE NOT EXISTS "
        "(SELECT 1 FROM {table} WHERE {key} = %s AND {scope} = %s)"
    )
    # record has changed since last read, lock wait timeout, deadlock, NOWAIT failed
    busy = frozenset({1020, 1205, 1213, 3572})
    duplicate = 1062

    def __init__(self, using: str) -> None:
        super().__init__(using)
        self._held = threading.local()

    def claim(self, operation: Operation, token: str) -> int | None:
        if not self._lock(operation):
            return None
        with connections[self.using].cursor() as cursor:
            try:
                cursor.execute(
                    self.insert_sql,
                    [*self.values(operation, token), operation.key, operation.scope],
                )
            except IntegrityError as error:
                if self.code(error.__cause__) != self.duplicate:
                    raise
                return None
            except OperationalError as error:
                # Somebody holds the row after all, a purge say: the caller reads what is there.
                if not self.is_busy(error):
                    raise
                return None
            return int(cursor.lastrowid) if cursor.rowcount == 1 else None

    def lockable(
        self, rows: QuerySet[IdempotencyKey], operation: Operation
    ) -> QuerySet[IdempotencyKey]:
        return rows if self._lock(operation) else rows.none()

    def release(self) -> None:
        names, self._held.names = getattr(self._held, "names", []), []
        if not names:
            return
        # Without a connection the session is gone, and its locks with it.
        with suppress(DatabaseFault), connections[self.using].cursor() as cursor:
            for name in names:
                cursor.execute("SELECT RELEASE_LOCK(%s)", [name])

    def code(self, error: BaseException | None) -> object:
        return error.args[0] if error and error.args else None

    def _lock(self, operation: Operation) -> bool:
        name = self._lock_name(operation)
        with connections[self.using].cursor() as cursor:
            cursor.execute("SELECT GET_LOCK(%s, 0)", [name])
            row = cursor.fetchone()
        if not (row and row[0]):
            return False
        # A session may hold a lock several times and must release it as often.
        self._held.names = [*getattr(self._held, "names", []), name]
        return True

    @staticmethod
    def _lock_name(operation: Operation) -> str:
        return f"idempotency:{_lock_digest(operation, 16).hex()}"


class SQLite(Dialect):
    """The lock is the database's one write lock, held by the transaction."""

    now = "STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW')"
    later = "STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW', %s || ' seconds')"
    insert = Dialect.insert + " ON CONFLICT DO NOTHING"
    busy = frozenset(
        {
            "SQLITE_BUSY",
            "SQLITE_BUSY_RECOVERY",
            "SQLITE_BUSY_SNAPSHOT",
            "SQLITE_BUSY_TIMEOUT",
            "SQLITE_LOCKED",
        }
    )

    def claim(self, operation: Operation, token: str) -> int | None:
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.insert_sql, self.values(operation, token))
            return int(cursor.lastrowid) if cursor.rowcount == 1 else None

    def code(self, error: BaseException | None) -> object:
        return getattr(error, "sqlite_errorname", None)


DIALECTS: dict[str, type[Dialect]] = {
    "postgresql": PostgreSQL,
    "mysql": MySQL,
    "sqlite": SQLite,
}
