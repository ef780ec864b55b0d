"""How the statements of a transaction reach the server: one by one, or several in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

from django.db import Error as DatabaseFault
from django.db.backends.base.base import BaseDatabaseWrapper

from ....errors import ClaimLost
from ....records import Claim
from .statements import Parameters

LOST: Final = "idempotency_django: the claim has another owner"
"""What the server says when it did not commit, because a statement found no row of its owner's."""

_NO_PIPELINE = 0  # of its PGpipelineStatus

_OR_LOST: Final = (
    "WITH written AS (\n{statement}\n) "
    f"SELECT CAST(CASE count(*) WHEN 0 THEN '{LOST}' ELSE '1' END AS integer) FROM written"
)


def can_combine(connection: Any) -> bool:
    """Whether the driver sends a string as it is, and its BEGIN would say no more than ours."""
    cursors = getattr(connection.Database, "ClientCursor", None)  # psycopg2 has none
    driver = connection.connection
    return (
        cursors is not None
        and hasattr(driver, "_autocommit")  # see below
        and isinstance(driver.cursor_factory, type)
        and issubclass(driver.cursor_factory, cursors)
        and driver.isolation_level is driver.read_only is driver.deferrable is None
        and driver.pgconn.pipeline_status == _NO_PIPELINE
    )


def with_begin(
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


def with_commit(execute: Callable[..., Any], sql: str, *arguments: Any) -> Any:
    """Send COMMIT after the statement, in one message."""
    return execute(f"{sql}\n; COMMIT", *arguments)


def or_lost(statement: str) -> str:
    """A statement that does the same; if it finds no row, the server says ``LOST``.

    The server stops at an error, so that a COMMIT after it is not executed for a late owner.
    """
    return _OR_LOST.format(statement=statement)


_IDLE, _IN_TRANSACTION, _IN_ERROR = 0, 2, 3  # of libpq's PGTransactionStatusType


class Deferred(NamedTuple):
    """A statement that may wait for the COMMIT."""

    sql: str
    """Finds a row."""
    or_lost: str
    """The same; if it finds none, the server says ``LOST``."""
    given: Parameters


class Messages:
    """The statements of one transaction, each of which is sent by itself."""

    def beginning(self) -> AbstractContextManager[None]:
        """The statement in the block may be the first one of the transaction."""
        return nullcontext()

    def claimed(self, claim: Claim) -> None:
        """The transaction holds the claim."""

    def defer(self, claim: Claim, deferred: Deferred) -> bool:
        """Whether this statement, which writes a row for the claim, is sent with the COMMIT."""
        return False

    def defer_fenced(self, deferred: Deferred) -> bool:
        """The same for what locks the row of an earlier transaction's claim, or adds a step."""
        return False


class Pipeline(Messages):
    """BEGIN goes with the claim, and COMMIT with the answer or a step.

    A step that has executed no statement of its own is one message: BEGIN, its result and COMMIT.

    All this needs psycopg 3, which sends a string of several statements as it is, and a transaction
    that the store has opened itself. Django takes no notice: its own COMMIT finds that the
    transaction has ended, and sends nothing. If somebody else has wrapped Django's cursors, each
    statement is sent by itself, because a wrapper may add statements or change ours. These
    conditions are checked once the cursor exists, because making it may send a statement, too: one
    that sets a tenant's search path, for example.

    Args:
        connection: the database's, on which no transaction was open.
        is_lost: whether an error says ``LOST``.
    """

    def __init__(
        self, connection: BaseDatabaseWrapper, is_lost: Callable[[DatabaseFault], bool]
    ) -> None:
        self._connection = connection
        self._is_lost = is_lost
        self._tokens: set[str] = set()
        self._last: Deferred | None = None
        self._stopped = False
        self.over = False  # what hooks do after the commit is their own affair

    @contextmanager
    def beginning(self) -> Iterator[None]:
        if not self._may_combine(_IDLE):
            yield
            return
        with self._connection.execute_wrapper(with_begin):
            yield

    def claimed(self, claim: Claim) -> None:
        self._tokens.add(claim.token)

    def defer(self, claim: Claim, deferred: Deferred) -> bool:
        return claim.token in self._tokens and self._defer(deferred, _IN_TRANSACTION)

    def defer_fenced(self, deferred: Deferred) -> bool:
        return self._defer(deferred, _IDLE, _IN_TRANSACTION)

    @property
    def stopped_before_commit(self) -> bool:
        """Whether the server refused what was sent with the COMMIT, and came to no COMMIT."""
        return self._stopped

    def _defer(self, deferred: Deferred, *statuses: int) -> bool:
        if not self._may_combine(*statuses):
            return False
        if not self._send():  # another claim's
            raise ClaimLost
        self._last = deferred
        # The outermost, so that it is not taken for another one's when that is removed.
        self._connection.execute_wrappers.insert(0, self._before_another)
        return True

    def commit(self) -> bool:
        """Send what was kept. ``False``: it found no row; the transaction must be rolled back."""
        try:
            return self._connection.needs_rollback or self._send(last=True)
        except DatabaseFault as error:
            if self._is_lost(error):
                return False
            # After a COMMIT that failed, there is no transaction any more.
            self._stopped = self._status() == _IN_ERROR
            raise
        finally:
            self.over = True

    def end(self) -> None:
        """The transaction has ended: forget what was kept."""
        self.over = True
        self._take()

    def _before_another(self, execute: Callable[..., Any], *arguments: Any) -> Any:
        """Send what was kept for the end, where it turns out not to be the end."""
        if not self._send():
            raise ClaimLost
        return execute(*arguments)

    def _take(self) -> Deferred | None:
        last, self._last = self._last, None
        if last is not None:
            self._connection.execute_wrappers.remove(self._before_another)
        return last

    def _send(self, *, last: bool = False) -> bool:
        """Send what was kept, if there is something; ``False``: it found no row.

        Args:
            last: with the COMMIT, where that can be.
        """
        kept = self._take()
        if kept is None:
            return True
        with self._connection.cursor() as cursor:
            sql = kept.sql
            with ExitStack() as wrapped:
                if last and self._may_combine(_IDLE, _IN_TRANSACTION):
                    sql = kept.or_lost
                    wrapped.enter_context(self._connection.execute_wrapper(with_commit))
                    if self._status() == _IDLE:
                        wrapped.enter_context(self._connection.execute_wrapper(with_begin))
                cursor.execute(sql, kept.given)
            return bool(cursor.rowcount)

    def _status(self) -> int | None:
        driver = self._connection.connection
        return None if driver is None else driver.pgconn.transaction_status

    def _may_combine(self, *statuses: int) -> bool:
        """Whether the transaction is the store's own and has such a status, and the driver can."""
        connection = self._connection
        return (
            not self.over
            and len(connection.atomic_blocks) == 1
            and connection.commit_on_exit
            and not connection.needs_rollback
            and connection.execute_wrappers in ([], [self._before_another])
            and can_combine(connection)
            and self._status() in statuses
        )
