"""Several statements in one message to PostgreSQL, where psycopg 3 can do so.

BEGIN goes with the claim, and COMMIT with the response, a step, or the last look at a lease: a
first request takes as many round trips as a bare transaction. Django takes no notice: its own
COMMIT finds that the transaction has ended, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

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
