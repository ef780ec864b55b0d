"""Several statements of a transaction in one message to PostgreSQL, where psycopg 3 can do so.

BEGIN goes with the claim, and COMMIT with the response, a step, or the last look at a lease: a
first request takes as many round trips as a bare transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

from django.db import Error as DatabaseFault
from django.db.backends.base.base import BaseDatabaseWrapper

from ....errors import ClaimLost
from ...records import Claim
from .statements import Parameters

LOST: Final = "idempotency_django: the claim has another owner"
"""The server's error when it did not commit, because a statement found no row of its owner's."""

_OR_LOST: Final = (
    "WITH written AS (\n{statement}\n) "
    f"SELECT CAST(CASE count(*) WHEN 0 THEN '{LOST}' ELSE '1' END AS integer) FROM written"
)
_NO_PIPELINE_MODE: Final = 0  # of libpq's PGpipelineStatus
_IDLE, _IN_TRANSACTION, _IN_ERROR = 0, 2, 3  # of libpq's PGTransactionStatusType


def or_lost(statement: str) -> str:
    """A statement that does the same; if it finds no row, the server says ``LOST``.

    The server stops at an error, so that a COMMIT after it is not executed for a late owner.
    """
    return _OR_LOST.format(statement=statement)


class Deferred(NamedTuple):
    """A statement that may wait for the COMMIT."""

    sql: str
    """Finds a row."""
    or_lost: str
    """The same; if it finds none, the server says ``LOST``."""
    given: Parameters


class Pipeline:
    """The messages of one transaction.

    Several statements share a message if the driver is psycopg 3, which sends a string of several
    statements as it is, and if the store itself has opened the transaction. Django takes no notice:
    its own COMMIT finds that the transaction has ended, and sends nothing. If anything else wraps
    Django's cursors, each statement is sent alone, because a wrapper may add statements or
    change ours. All this is checked once the cursor exists, because making it may send a statement,
    too: one that sets a tenant's search path, for example.

    Args:
        connection: the database's, on which no transaction is open; ``None``: each statement is
            sent alone.
    """

    def __init__(self, connection: BaseDatabaseWrapper | None) -> None:
        self._connection: Any = connection
        self._tokens: set[str] = set()
        self._deferred: Deferred | None = None
        self._is_over = connection is None  # hooks after the commit are not tracked
        self.stopped_before_commit = False
        """Whether the server refused a statement before the COMMIT, so that it did not commit."""

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """The statement in the block is sent with BEGIN, if it is the first of the transaction."""
        with ExitStack() as wrapped:
            if self._may_combine(_IDLE):
                wrapped.enter_context(self._connection.execute_wrapper(_with_begin))
            yield

    def claimed(self, claim: Claim) -> None:
        """The transaction holds the claim."""
        if not self._is_over:
            self._tokens.add(claim.token)

    def defer(self, claim: Claim, statement: Deferred) -> bool:
        """Whether a statement that writes a row for the claim is sent with the COMMIT."""
        return claim.token in self._tokens and self._defer(statement, _IN_TRANSACTION)

    def defer_fenced(self, statement: Deferred) -> bool:
        """The same for what locks the row of an earlier transaction's claim, or adds a step.

        A step without statements of its own is one message then: BEGIN, its result and COMMIT.
        """
        return self._defer(statement, _IDLE, _IN_TRANSACTION)

    def commit(self) -> bool:
        """Send what was deferred. ``False``: it found no row; the transaction must roll back."""
        try:
            return self._connection.needs_rollback or self._send(with_commit=True)
        except DatabaseFault as error:
            if LOST in str(error):
                return False
            # After a failed COMMIT, no transaction is open.
            self.stopped_before_commit = self._status() == _IN_ERROR
            raise
        finally:
            self._is_over = True

    def end(self) -> None:
        """The transaction has ended: forget what was deferred."""
        self._is_over = True
        self._take()

    def _defer(self, statement: Deferred, *statuses: int) -> bool:
        if not self._may_combine(*statuses):
            return False
        if not self._send():  # another claim's
            raise ClaimLost
        self._deferred = statement
        # The outermost, so that it is not taken for another one's when that is removed.
        self._connection.execute_wrappers.insert(0, self._before_another)
        return True

    def _before_another(self, execute: Callable[..., Any], *arguments: Any) -> Any:
        """Send what was deferred to the end, where it turns out not to be the end."""
        if not self._send():
            raise ClaimLost
        return execute(*arguments)

    def _take(self) -> Deferred | None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._connection.execute_wrappers.remove(self._before_another)
        return deferred

    def _send(self, *, with_commit: bool = False) -> bool:
        """Send what was deferred, if there is something; ``False``: it found no row."""
        deferred = self._take()
        if deferred is None:
            return True
        with self._connection.cursor() as cursor, ExitStack() as wrapped:
            sql = deferred.sql
            if with_commit and self._may_combine(_IDLE, _IN_TRANSACTION):
                sql = deferred.or_lost
                wrapped.enter_context(self.beginning())
                wrapped.enter_context(self._connection.execute_wrapper(_with_commit))
            cursor.execute(sql, deferred.given)
            return bool(cursor.rowcount)

    def _status(self) -> int | None:
        driver = self._connection.connection
        return None if driver is None else driver.pgconn.transaction_status

    def _may_combine(self, *statuses: int) -> bool:
        """Whether the transaction is the store's own and has such a status, and the driver can."""
        if self._is_over:
            return False
        connection, driver = self._connection, self._connection.connection
        cursors = getattr(connection.Database, "ClientCursor", None)  # only psycopg 3 has them
        return (
            cursors is not None
            and len(connection.atomic_blocks) == 1
            and connection.commit_on_exit
            and not connection.needs_rollback
            and connection.execute_wrappers in ([], [self._before_another])
            # The driver sends a string as it is, and its BEGIN would say no more than ours.
            and hasattr(driver, "_autocommit")  # see _with_begin()
            and isinstance(driver.cursor_factory, type)
            and issubclass(driver.cursor_factory, cursors)
            and driver.isolation_level is driver.read_only is driver.deferrable is None
            and driver.pgconn.pipeline_status == _NO_PIPELINE_MODE
            and driver.pgconn.transaction_status in statuses
        )


def _with_begin(
    execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]
) -> Any:
    """Send BEGIN before the statement, in one message."""
    driver = context["connection"].connection
    driver.autocommit = True  # else psycopg would send a BEGIN of its own before
    try:
        result = execute(f"BEGIN; {sql}", params, many, context)
    finally:
        # As Django has set it, and asks for it: where it is on, iterator() declares its cursors
        # WITH HOLD, which cannot lock rows. The property cannot be set within a transaction.
        driver._autocommit = False
    context["cursor"].nextset()
    return result


def _with_commit(execute: Callable[..., Any], sql: str, *arguments: Any) -> Any:
    """Send COMMIT after the statement, in one message."""
    return execute(f"{sql}\n; COMMIT", *arguments)
