"""What differs between databases: the lock of a key, the clock, and the SQL.

On every database, the unique index makes two owners impossible. The lock of a key tells a duplicate
that it is one before its handler runs.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from functools import lru_cache
from typing import Any, ClassVar, Final, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.db import (
    DatabaseError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    connections,
)
from django.db import Error as DatabaseFault

from ..errors import REFUSED_MESSAGE, OperationInProgress, StoreUnavailable
from ..models import STEPS_INDEX, UNIQUE_KEY, IdempotencyKey, IdempotencyStep
from .records import Claim, Operation, Record, Status, StoredPayload, read_record

NOT_MIGRATED: Final = (
    "The tables of idempotency_django are missing from the database {using!r}, or older than "
    "the code. Run: manage.py migrate idempotency_django --database {using}"
)

_FACTS: Final = (
    "id, status, attempt, fingerprint, owner_token, hold, pinned, response_status, "
    "response_headers, response_body, {lease_left}, {ttl_left}"
)
_DESCRIPTION: Final = (
    *("scope", "fingerprint", "owner_token", "caused_by"),
    *("operation", "principal", "method", "path"),  # see described()
)
OWNED: Final = "id = %s AND owner_token = %s AND status = 'in_progress'"
"""The row of a claim, as long as it is its owner's."""


def plain(text: str, limit: int) -> str:
    """The text, cut to a column's length and rid of what a database refuses (NUL, surrogates)."""
    return (
        text[:limit].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
    )


def described(operation: Operation) -> tuple[str, ...]:
    """The name, principal, method and path of an operation as their columns have them."""
    name, path = operation.name[:255], operation.path[:2048]
    texts = (name, operation.principal[:255], operation.method[:16], path)
    if "".join(texts).isprintable():  # nearly always, and all at once
        return texts
    return tuple(plain(text, 2048) for text in texts)


class Fault(Enum):
    """What an error of a database says."""

    TAKEN = "the key has got a row from another transaction"
    BUSY = "another transaction is in the way"
    ENDED = "the server ended the transaction, because it took too long"
    MISSING = "a table or a column does not exist"
    UNREACHABLE = "the connection is lost, or nothing can be written"


class Dialect(ABC):
    """The SQL for one kind of database, composed from the model's own names.

    Building it through the ORM for each request would take longer than running it.
    """

    now: ClassVar[str]
    """The database's clock when the statement starts."""
    shifted: ClassVar[str]
    """The same, and a parameter's seconds later."""
    left: ClassVar[str]
    """The seconds from then until the time in a column ``{}``."""
    statements: ClassVar[Mapping[str, str]]
    """Its statements, where it has others than ``shared``."""
    faults: ClassVar[Mapping[object, Fault]]
    """What the driver's error codes say."""
    taken: ClassVar[str] = UNIQUE_KEY
    """What its error says if the key has got a row from another transaction."""
    locks_database: ClassVar[bool] = False
    """Whether a transaction that writes locks the database for all others."""
    least_lease: ClassVar[timedelta] = timedelta(minutes=1)
    """The lease of a row whose claim has none. It counts only if the handler commits the row early,
    as ``ALTER TABLE`` does on MariaDB, and its owner dies then.
    """

    shared: ClassVar[Mapping[str, str]] = {
        "read": f"SELECT {_FACTS} FROM {{table}} WHERE {{key}} = %s AND scope = %s",
        "read_locked": f"SELECT {_FACTS} FROM {{table}} WHERE {{key}} = %s AND scope = %s"
        " FOR UPDATE SKIP LOCKED",
        "complete": (
            "UPDATE {table} SET status = 'completed', response_status = %s, response_headers = %s, "
            "response_body = %s, completed_at = {now}, lease_expires_at = NULL, "
            f"expires_at = [expires_at], purge_at = [purge_at] WHERE {OWNED}"
        ),
        "count": "UPDATE {table} SET [changes] WHERE id = %s",
        # Locks the row of a claim until the transaction ends.
        "fence": f"SELECT 1 FROM {{table}} WHERE {OWNED} FOR UPDATE",
        # Locks it likewise, and adds a step to it.
        "save_step": (
            "INSERT INTO {steps} (record_id, name, attempt, result, completed_at) "
            f"SELECT id, %s, %s, %s, {{now}} FROM {{table}} WHERE {OWNED} FOR UPDATE"
        ),
    }

    def __init__(self, using: str, *, combine: bool = True) -> None:
        self.using = using
        self.combine = combine
        """Whether several statements may be sent in one message."""
        quote = connections[using].ops.quote_name
        self.names = {
            "table": quote(IdempotencyKey._meta.db_table),
            "steps": quote(IdempotencyStep._meta.db_table),
            "steps_index": quote(STEPS_INDEX),
            "key": quote("key"),  # which is a reserved word of MySQL
            "now": self.now,
            "shifted": self.shifted,
            "lease_left": self.left.format("lease_expires_at"),
            "ttl_left": self.left.format("expires_at"),
        }
        templates = {**self.shared, **self.statements}
        self.sql = {name: text.format(**self.names) for name, text in templates.items()}
        self._insertion = lru_cache(maxsize=256)(self._compose_insertion)

    def after(self, duration: timedelta | None) -> str:
        """The time that long from now; ``None``: none."""
        if duration is None:
            return "NULL"
        return self.shifted.replace("%s", f"{duration.total_seconds():f}")

    # Asking the database.

    def execute(self, sql: str, *given: Any) -> int:
        """Execute a statement; the number of rows that it found or wrote."""
        with connections[self.using].cursor() as cursor:
            cursor.execute(sql, given)
            return int(cursor.rowcount)

    def execute_last(self, sql: str, *given: Any, unsure: bool = True) -> bool:
        """Execute the last statement of a transaction, maybe together with its COMMIT.

        Args:
            sql: the statement.
            given: its parameters.
            unsure: whether it may find no row; then it must not be committed.

        Returns:
            Whether it found a row.
        """
        return bool(self.execute(sql, *given))

    def rows(self, statement: str, *given: Any) -> list[tuple[Any, ...]]:
        """The rows that a statement selects."""
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.sql[statement], given)
            return list(cursor.fetchall())

    def record(self, key: str, scope: str, statement: str = "read") -> Record | None:
        """The record of a key, if there is one that the statement finds."""
        rows = self.rows(statement, key, scope)
        return read_record(key, scope, rows[0]) if rows else None

    def records(self, names: Sequence[tuple[str, str]]) -> Mapping[tuple[str, str], Record]:
        """The records of several keys, by key and scope."""
        return {name: found for name in names if (found := self.record(*name)) is not None}

    # Claims.

    @abstractmethod
    def claim(self, claim: Claim, connection: Any) -> Claim | Record | None:
        """Claim a key that has no row, or return its record. ``None``: it is claimed elsewhere.

        With a lease, the claim returned has a row, which all can see. Without one, nothing need be
        written before the response: the running transaction holds the lock of the key.

        Args:
            claim: the wanted one.
            connection: the database's.
        """

    def claim_many(self, claims: Sequence[Claim]) -> Sequence[Claim | Record | None]:
        """:meth:`claim` for several keys, without leases and in their order."""
        connection = connections[self.using]
        return [self.claim(claim, connection) for claim in claims]

    def insertion(
        self,
        claim: Claim,
        response: StoredPayload | None = None,
        *,
        lease: timedelta | None = None,
    ) -> tuple[str, str, tuple[Any, ...]]:
        """The first row of a claim's key: INSERT up to its columns, the values, the parameters.

        It is completed if there is a response, and in progress if there is none.
        """
        operation = claim.operation
        into, values = self._insertion(
            response is not None, operation.ttl, operation.retention, lease, operation.hold
        )
        code, *content = response or (None,)
        given = (
            operation.key,
            operation.scope,
            operation.fingerprint,
            claim.token,
            operation.caused_by,
            *described(operation),
            claim.asked_at - time.monotonic(),
            *content,
        )
        # There are few codes, and a driver that has seen a statement does not parse it again.
        return into, values.format(code=code), given

    def _compose_insertion(
        self,
        completed: bool,
        ttl: timedelta | None,
        retention: timedelta,
        lease: timedelta | None,
        hold: bool,
    ) -> tuple[str, str]:
        columns = [
            # In the order of what insertion() gives.
            *((column, "%s") for column in (self.names["key"], *_DESCRIPTION)),
            ("created_at", self.shifted),
            ("response_headers", "%s" if completed else "'[]'"),
            ("response_body", "%s" if completed else "NULL"),
            # Constants.
            ("response_status", "{code}" if completed else "NULL"),
            ("completed_at", self.now if completed else "NULL"),
            ("status", f"'{Status.COMPLETED if completed else Status.IN_PROGRESS}'"),
            ("attempt", "1"),
            ("hold", str(hold)),
            ("pinned", "False"),
            ("replay_count", "0"),
            ("error", "''"),
            ("lease_expires_at", self.after(lease)),
            ("expires_at", self.after(ttl)),
            ("purge_at", self.after(None if ttl is None else ttl + retention)),
        ]
        names, values = zip(*columns, strict=True)
        return f"INSERT INTO {self.names['table']} ({', '.join(names)})", ", ".join(values)

    def complete(self, claim: Claim, response: StoredPayload, *, last: bool = False) -> bool:
        """Store the response of a claim, if it is its owner's."""
        operation = claim.operation
        if not claim.record_id:
            into, values, given = self.insertion(claim, response)
            sql = f"{into} VALUES ({values})"
        else:
            sql = self._with_lifetime(self.sql["complete"], operation)
            given = (*response, claim.record_id, claim.token)
        if last:
            return self.execute_last(sql, *given, unsure=bool(claim.record_id))
        return bool(self.execute(sql, *given))

    def insert(self, rows: Sequence[tuple[Claim, StoredPayload | None]]) -> None:
        """Write the rows of claims that have none, all of them completed or all in progress."""
        composed = [self.insertion(claim, response) for claim, response in rows]
        all_values = ", ".join(f"({values})" for _, values, _ in composed)
        all_given = (parameter for _, _, given in composed for parameter in given)
        self.execute(f"{composed[0][0]} VALUES {all_values}", *all_given)

    def count(self, record_id: int, operation: Operation) -> None:
        """Note a replay of a record as the operation asks, at the end of a transaction."""
        changes = []
        if operation.count_replays:
            changes += ["replay_count = replay_count + 1", f"last_replayed_at = {self.now}"]
        if operation.extend_on_replay:
            lifetime = "expires_at = [expires_at], purge_at = [purge_at]"
            changes.append(self._with_lifetime(lifetime, operation))
        sql = self.sql["count"].replace("[changes]", ", ".join(changes))
        sql = sql.replace("[extends]", str(operation.extend_on_replay))
        self.execute_last(sql, record_id, unsure=False)

    def _with_lifetime(self, sql: str, operation: Operation) -> str:
        """A statement that says how long a row lives that is written or used now."""
        expires, purged = self.after(operation.ttl), self.after(operation.kept)
        return sql.replace("[expires_at]", expires).replace("[purge_at]", purged)

    # What its errors say.

    def fault(self, error: BaseException) -> Fault | None:
        """What a database error says; ``None``: it is none, or one of the statement's own."""
        if not isinstance(error, DatabaseError | InterfaceError):
            return None
        if self.is_taken(error):
            return Fault.TAKEN
        lost = Fault.UNREACHABLE if isinstance(error, OperationalError | InterfaceError) else None
        return self.faults.get(self.code(error.__cause__), lost)

    def translated(self, error: DatabaseFault, *, rolled_back: bool = False) -> Exception:
        """The store's error for one of the database's, if it has one; else that error.

        Args:
            error: the database's.
            rolled_back: whether it is known that nothing was committed.
        """
        fault = self.fault(error)
        match fault:
            case Fault.MISSING:
                return ImproperlyConfigured(NOT_MIGRATED.format(using=self.using))
            case Fault.TAKEN:  # by a transaction that this one's snapshot cannot see
                return OperationInProgress(REFUSED_MESSAGE)
            case Fault.BUSY:
                in_progress = OperationInProgress()
                in_progress.busy = self.locks_database
                return in_progress
            case Fault.ENDED | Fault.UNREACHABLE:
                unavailable = StoreUnavailable()
                unavailable.rolled_back = rolled_back or fault is Fault.ENDED
                return unavailable
            case None:
                return error

    def raise_translated(self, error: DatabaseFault) -> NoReturn:
        """Raise the store's error for one of the database's, if it has one; else that error."""
        better = self.translated(error)
        if better is error:
            raise error
        raise better from error

    def is_busy(self, error: BaseException) -> bool:
        """Whether a database error is a conflict with another transaction, not a fault."""
        return self.fault(error) is Fault.BUSY

    def is_taken(self, error: BaseException) -> bool:
        """Whether a database error says that the key has got a row from another transaction."""
        return isinstance(error, IntegrityError) and self.taken in str(error)

    @abstractmethod
    def code(self, error: BaseException | None) -> object:
        """The driver's code of an error."""


# By the primary key. Where few rows are left, IN would read the whole table and wait for each row
# that is locked: two purges would deadlock.
_BATCH: Final = "JSON_TABLE(%s, '$[*]' COLUMNS (id BIGINT PATH '$')) batch STRAIGHT_JOIN"

PAUSES: Final = (0.005, 0.02, 0)
"""Seconds after an INSERT that a lock refused on MariaDB, until the next one. The lock may be
that of another key's duplicate: where an INSERT repeats a key, InnoDB locks the gap before its row
until that transaction ends.
"""


class MySQL(Dialect):
    """The lock is that of the row, which is there from the claim on.

    Looking comes first: an INSERT that fails would lock the gap, and with it other keys.
    """

    now = "UTC_TIMESTAMP(6)"
    shifted = "UTC_TIMESTAMP(6) + INTERVAL %s SECOND"
    left = "TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), {}) / 1e6"
    statements = {
        # Of the next transaction. Above it, a purge would lock the gaps that new keys go into.
        "purge_level": "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
        "purge_steps": (
            f"DELETE target FROM {_BATCH} {{steps}} target FORCE INDEX FOR JOIN ({{steps_index}}) "
            "ON target.record_id = batch.id"
        ),
        "purge": (
            f"DELETE target FROM {_BATCH} {{table}} target FORCE INDEX FOR JOIN (PRIMARY) "
            "ON target.id = batch.id"
        ),
    }
    faults = {
        1020: Fault.BUSY,  # record has changed since last read
        1205: Fault.BUSY,  # lock wait timeout
        1213: Fault.BUSY,  # deadlock, which has rolled back everything
        1467: Fault.BUSY,  # lock wait timeout of the next number of a table, as InnoDB has it
        3572: Fault.BUSY,  # NOWAIT failed
        1054: Fault.MISSING,  # unknown column
        1146: Fault.MISSING,  # table does not exist
    }
    locked = frozenset({1205, 1467})  # by an INSERT that is not committed

    def claim(self, claim: Claim, connection: Any) -> Claim | Record | None:
        operation = claim.operation
        record = self.record(operation.key, operation.scope)
        if record is not None:
            return record
        lease = operation.lease or self.least_lease
        into, values, given = self.insertion(claim, lease=lease)
        sql = self._without_waiting(f"{into} VALUES ({values})")
        with connection.cursor() as cursor:
            for pause in PAUSES if connection.mysql_is_mariadb else (0,):
                try:
                    cursor.execute(sql, given)
                except DatabaseFault as error:
                    if self.is_taken(error):  # since we looked, or since this transaction did first
                        return self.record(operation.key, operation.scope, "read_locked")
                    if self.code(error.__cause__) not in self.locked:
                        raise
                    time.sleep(pause)
                else:
                    return replace(claim, record_id=int(cursor.lastrowid))
        return None

    def execute_last(self, sql: str, *given: Any, unsure: bool = True) -> bool:
        # A count, which is not worth waiting for.
        return super().execute_last(sql if unsure else self._without_waiting(sql), *given)

    def _without_waiting(self, sql: str) -> str:
        connection: Any = connections[self.using]
        if connection.mysql_is_mariadb:
            return f"SET STATEMENT innodb_lock_wait_timeout=0 FOR {sql}"
        verb, rest = sql.split(" ", 1)
        return f"{verb} /*+ SET_VAR(innodb_lock_wait_timeout = 1) */ {rest}"

    def code(self, error: BaseException | None) -> object:
        return error.args[0] if error and error.args else None


_FORMAT = "'%%Y-%%m-%%d %%H:%%M:%%f'"


class SQLite(Dialect):
    """The lock is the database's one write lock, held by the transaction."""

    now = f"STRFTIME({_FORMAT}, 'NOW')"
    shifted = f"STRFTIME({_FORMAT}, 'NOW', %s || ' seconds')"
    left = "(JULIANDAY({}) - JULIANDAY('NOW')) * 86400.0"
    taken = f"UNIQUE constraint failed: {IdempotencyKey._meta.db_table}.key"
    locks_database = True
    statements = {
        # It takes the write lock, in any mode of transactions.
        "lock": "DELETE FROM {table} WHERE 0",
        "read_locked": Dialect.shared["read"],
        # The transaction may have only read so far.
        "fence": f"UPDATE {{table}} SET attempt = attempt WHERE {OWNED}",
        "save_step": Dialect.shared["save_step"].removesuffix(" FOR UPDATE"),
        "purge_steps": "DELETE FROM {steps} WHERE record_id IN (SELECT value FROM JSON_EACH(%s))",
        "purge": "DELETE FROM {table} WHERE id IN (SELECT value FROM JSON_EACH(%s))",
    }
    faults = {
        "SQLITE_BUSY": Fault.BUSY,
        "SQLITE_BUSY_RECOVERY": Fault.BUSY,
        "SQLITE_BUSY_SNAPSHOT": Fault.BUSY,
        "SQLITE_BUSY_TIMEOUT": Fault.BUSY,
        "SQLITE_LOCKED": Fault.BUSY,
        "SQLITE_LOCKED_SHAREDCACHE": Fault.BUSY,  # in memory, as a test database may be
        "no such": Fault.MISSING,
    }

    def claim(self, claim: Claim, connection: Any) -> Claim | Record | None:
        operation = claim.operation
        if operation.lease is None:
            self.execute(self.sql["lock"])
            return self.record(operation.key, operation.scope) or claim
        into, values, given = self.insertion(claim, lease=operation.lease)
        with connection.cursor() as cursor:
            cursor.execute(f"{into} VALUES ({values}) ON CONFLICT DO NOTHING", given)
            if cursor.rowcount:
                return replace(claim, record_id=int(cursor.lastrowid))
        return self.record(operation.key, operation.scope)

    def code(self, error: BaseException | None) -> object:
        wrong = ("no such table", "no such column", "has no column")
        if any(each in str(error) for each in wrong):  # which have no code of their own
            return "no such"
        return getattr(error, "sqlite_errorname", None)
