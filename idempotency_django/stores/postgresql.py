"""PostgreSQL, through psycopg 3 or psycopg2.

Where psycopg 3 can send several statements in one message, BEGIN goes with the claim, and COMMIT
with the response, a step, or the last look at a lease: a first request takes as many round trips as
a bare transaction. Django takes no notice: its own COMMIT finds that the transaction has ended, and
sends nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from django.db import Error as DatabaseFault
from django.db import connections

from .dialects import Dialect, Fault
from .records import Claim, Operation, Record, read_record
from .transactions import StoreTransaction

# The rows that a purge deletes. IN would make it a join, which may read the whole table.
_CHOSEN: Final = "SELECT value::bigint FROM JSON_ARRAY_ELEMENTS_TEXT(%s::json)"
# Each table, and so each schema, has locks of its own.
_LOCK: Final = "pg_try_advisory_xact_lock({} # '{{table}}'::regclass::oid::bigint)"

LOST: Final = "idempotency_django: the claim has another owner"
OR_LOST: Final = (
    "WITH written AS ({statement}) "
    f"SELECT CAST(CASE count(*) WHEN 0 THEN '{LOST}' ELSE '1' END AS integer) FROM written"
)
"""A statement that does the same; if it finds no row, the server says that it was lost. The server
stops at an error, so that a COMMIT after it is not executed for a late owner.
"""
_NO_PIPELINE_MODE: Final = 0  # of libpq's PGpipelineStatus
_IDLE, _IN_ERROR = 0, 3  # of libpq's PGTransactionStatusType


class PostgreSQL(Dialect):
    """The lock is a transaction-scoped advisory lock.

    It is safe behind PgBouncer in transaction mode and gone when the connection dies.
    """

    now = "STATEMENT_TIMESTAMP()"
    shifted = "STATEMENT_TIMESTAMP() + %s::double precision * INTERVAL '1 second'"
    left = "EXTRACT(EPOCH FROM {} - STATEMENT_TIMESTAMP())::double precision"
    statements = {
        "lock": f"SELECT {_LOCK.format('%s')}",
        "lock_many": (
            f"SELECT {_LOCK.format('number')} "
            "FROM UNNEST(%s::bigint[]) WITH ORDINALITY AS keys (number, place) ORDER BY place"
        ),
        "if_locked": (
            f"WHERE {_LOCK.format('%s')} ON CONFLICT ({{key}}, scope) DO NOTHING RETURNING id"
        ),
        # A join might read the whole table. The scopes are compared once the index has found the
        # keys: it would look for each pair of both.
        "read_many": Dialect.shared["read"]
        .replace("SELECT ", "SELECT {key}, scope, ")
        .replace("= %s AND scope = %s", "= ANY (%s) AND scope || '' = ANY (%s)"),
        "complete": f"{Dialect.shared['complete']} RETURNING id",
        "save_step": f"{Dialect.shared['save_step']} RETURNING id",
        # A COMMIT of a mere count does not wait for the disk: losing it in a crash is harmless.
        "count": (
            "UPDATE {table} SET [changes] WHERE id = ANY (ARRAY(SELECT id FROM {table} WHERE "
            "id = %s AND ([extends] OR set_config('synchronous_commit', 'off', true) = 'off') "
            "FOR UPDATE SKIP LOCKED))"
        ),
        "purge_steps": f"DELETE FROM {{steps}} WHERE record_id = ANY (ARRAY({_CHOSEN}))",
        "purge": f"DELETE FROM {{table}} WHERE id = ANY (ARRAY({_CHOSEN}))",
    }
    faults = {
        "55P03": Fault.BUSY,  # lock_not_available
        "40001": Fault.BUSY,  # serialization_failure
        "40P01": Fault.BUSY,  # deadlock_detected
        "25P03": Fault.ENDED,  # idle_in_transaction_session_timeout
        "25P04": Fault.ENDED,  # transaction_timeout
        "42P01": Fault.MISSING,  # undefined_table
        "42703": Fault.MISSING,  # undefined_column
        "25006": Fault.UNREACHABLE,  # read_only_sql_transaction
    }

    def after(self, duration: timedelta | None) -> str:
        if duration is None:
            return "NULL::timestamptz"  # which a SELECT would take for a text
        return f"{self.now} + INTERVAL '{duration.total_seconds():f} seconds'"

    def claim(self, claim: Claim, connection: Any) -> Claim | Record | None:
        operation = claim.operation
        lock, name = lock_number(operation), (operation.key, operation.scope)
        if operation.lease is None:
            # The look comes after the lock, to see what was committed before that was had.
            [(locked,)], rows = self._both(connection, self.sql["lock"], (lock,), "read", name)
            free = claim if locked else None
            return read_record(*name, rows[0]) if rows else free
        into, values, given = self.insertion(claim, lease=operation.lease)
        insert = f"{into} SELECT {values} {self.sql['if_locked']}"
        inserted, rows = self._both(connection, insert, (*given, lock), "read", name)
        if inserted:
            return replace(claim, record_id=inserted[0][0])
        return read_record(*name, rows[0]) if rows else None

    def _both(
        self, connection: Any, sql: str, given: Sequence[Any], selection: str, named: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The rows of a statement, and then those of a selection; in one message, if possible."""
        cursor, then = connection.cursor(), self.sql[selection]
        if not (self.combine and combines(connection)):
            cursor.execute(sql, given)
            first = cursor.fetchall()
            cursor.execute(then, named)
            return first, cursor.fetchall()
        send(connection, cursor, f"{sql}; {then}", (*given, *named))
        results = cursor.cursor  # the driver's own: what follows asks the server nothing more
        first = results.fetchall()
        results.nextset()
        ours = StoreTransaction.whole(connection)
        # Other backends than Django's own may prepare each cursor, such as for a tenant's schema.
        if ours is not None and type(connection).__module__.startswith("django."):
            ours.cursor = cursor
        return first, results.fetchall()

    def claim_many(self, claims: Sequence[Claim]) -> Sequence[Claim | Record | None]:
        names = [(claim.key, claim.scope) for claim in claims]
        numbers = [lock_number(claim.operation) for claim in claims]
        locks, rows = self._both(
            connections[self.using], self.sql["lock_many"], (numbers,), "read_many", _sets(names)
        )
        found = _by_name(rows)
        return [
            found.get(name) or (claim if locked else None)
            for name, claim, (locked,) in zip(names, claims, locks, strict=True)
        ]

    def records(self, names: Sequence[tuple[str, str]]) -> Mapping[tuple[str, str], Record]:
        return _by_name(self.rows("read_many", *_sets(names)))

    def execute_last(self, sql: str, *given: Any, unsure: bool = True) -> bool:
        connection = connections[self.using]
        ours = StoreTransaction.whole(connection)
        if ours is not None and ours.cursor is not None:
            cursor, together = ours.cursor, combines_still(connection)
        else:
            cursor = connection.cursor()
            together = ours is not None and self.combine and combines(connection)
        if ours is None or not together:
            cursor.execute(sql, given)
            return bool(cursor.rowcount)
        if unsure:
            sql = OR_LOST.format(statement=sql)
        try:
            send(connection, cursor, f"{sql}; COMMIT", given)
        except DatabaseFault as error:
            if unsure and LOST in str(error):
                return False
            ours.sent_commit, ours.was_stopped = True, was_stopped(connection)
            raise
        ours.committed = True
        return True

    def code(self, error: BaseException | None) -> object:
        return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


def _sets(names: Sequence[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """The keys and the scopes of records."""
    return [key for key, _ in names], sorted({scope for _, scope in names})


def _by_name(rows: Sequence[tuple[Any, ...]]) -> Mapping[tuple[str, str], Record]:
    return {(key, scope): read_record(key, scope, row) for key, scope, *row in rows}


def lock_number(operation: Operation) -> int:
    """The number of the advisory lock on the operation's key."""
    name = f"{len(operation.key)}:{operation.key}{operation.scope}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), signed=True)


# Several statements in one message.


def combines(connection: Any) -> bool:
    """Whether several statements can be sent in one message; ask it once a cursor is open.

    Making a cursor may send a statement, too: one that sets a tenant's search path, for example. If
    anything else wraps Django's cursors, each statement is sent alone, because a wrapper may add
    statements or change ours.
    """
    cursors = getattr(connection.Database, "ClientCursor", None)  # only psycopg 3 has them
    driver = connection.connection
    return (
        cursors is not None
        # The driver sends a string as it is, and its BEGIN would say no more than ours.
        and hasattr(driver, "_autocommit")  # see send()
        and isinstance(driver.cursor_factory, type)
        and issubclass(driver.cursor_factory, cursors)
        and driver.isolation_level is driver.read_only is driver.deferrable is None
        and combines_still(connection)
    )


def combines_still(connection: Any) -> bool:
    """Whether they can still be, on a connection where they could when the transaction began."""
    return (
        not connection.execute_wrappers
        and not connection.needs_rollback
        and connection.connection.pgconn.pipeline_status == _NO_PIPELINE_MODE
    )


def send(connection: Any, cursor: Any, sql: str, given: Sequence[Any]) -> None:
    """Execute statements in one message, after BEGIN where a transaction is to begin."""
    driver = connection.connection
    if not connection.in_atomic_block or driver.pgconn.transaction_status != _IDLE:
        cursor.execute(sql, given)
        return
    # Not by the property: it is a round of calls, and cannot be set within a transaction.
    driver._autocommit = True  # else psycopg would send a BEGIN of its own before
    try:
        cursor.execute(f"BEGIN; {sql}", given)
    finally:
        # As Django has set it, and asks for it: where it is on, iterator() declares its cursors
        # WITH HOLD, which cannot lock rows.
        driver._autocommit = False
    cursor.cursor.nextset()  # the driver's own: it has all results by now


def execute_first(
    connection: Any, cursor: Any, sql: str, given: Sequence[Any], combine: bool
) -> None:
    """Execute a statement, in one message with BEGIN if it is the first of a transaction.

    Args:
        connection: the database's.
        cursor: a cursor of it.
        sql: the statement.
        given: its parameters.
        combine: whether several statements may be sent in one message at all.
    """
    if combine and combines(connection):
        send(connection, cursor, sql, given)
    else:
        cursor.execute(sql, given)


def was_stopped(connection: Any) -> bool:
    """Whether the server has refused a statement before the COMMIT, so that it did not commit.

    After a failed COMMIT, no transaction is open.
    """
    driver = connection.connection
    return driver is not None and driver.pgconn.transaction_status == _IN_ERROR
