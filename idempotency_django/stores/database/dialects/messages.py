"""How the statements of a transaction reach the server: one by one, or several in one message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from django.db import Error as DatabaseFault
from django.db.backends.base.base import BaseDatabaseWrapper

from ....errors import ClaimLost
from ....records import Claim
from .joining import can_combine, if_written_with_commit, with_begin, with_commit
from .statements import Parameters

logger = logging.getLogger("idempotency_django")

_IDLE, _IN_TRANSACTION, _IN_ERROR = 0, 2, 3  # of libpq's PGTransactionStatusType


class Messages:
    """The statements of one transaction, each of which is sent by itself."""

    def beginning(self) -> AbstractContextManager[None]:
        """The statement in the block may be the first one of the transaction."""
        return nullcontext()

    def counting(self) -> AbstractContextManager[None]:
        """The statement in the block counts a replay, if there is one."""
        return nullcontext()

    def counted(self, sql: str, given: Parameters) -> None:
        """A replay was counted; the statement takes that back."""

    def claimed(self, claim: Claim) -> None:
        """The transaction holds the claim."""

    def keep(self, claim: Claim, sql: str, given: Parameters) -> bool:
        """Whether this statement, which writes a row for the claim, is sent with the COMMIT."""
        return False

    def keep_fenced(self, sql: str, given: Parameters) -> bool:
        """The same for what locks the row of an earlier transaction's claim, or adds a step."""
        return False


class CombinedMessages(Messages):
    """BEGIN goes with the claim, and COMMIT with the answer, a step or the count of a replay.

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
        self._saw_record = (
            False  # BEGIN went with a claim that found a record; nothing was sent since
        )
        self._ended = False  # COMMIT went with the count of a replay
        self._tokens: set[str] = set()
        self._last: tuple[str, Parameters] | None = None
        self._undo: list[tuple[str, Parameters]] = []
        self._rolls_back = False
        self._stopped = False
        self.over = False  # what hooks do after the commit is their own affair

    @contextmanager
    def beginning(self) -> Iterator[None]:
        self._saw_record = False
        if not self._may_combine(_IDLE):
            yield
            return
        with self._connection.execute_wrapper(with_begin):
            yield
        self._saw_record = True

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._ended, saw_record = False, self._saw_record
        self._saw_record = False
        if not (saw_record and self._may_combine(_IN_TRANSACTION)):
            yield
            return
        with self._connection.execute_wrapper(with_commit):
            yield
        self._ended = True

    def counted(self, sql: str, given: Parameters) -> None:
        if self._ended:
            self._undo.append((sql, given))

    def claimed(self, claim: Claim) -> None:
        self._saw_record = False
        self._tokens.add(claim.token)

    def keep(self, claim: Claim, sql: str, given: Parameters) -> bool:
        return claim.token in self._tokens and self._keep(sql, given, _IN_TRANSACTION)

    def keep_fenced(self, sql: str, given: Parameters) -> bool:
        return self._keep(sql, given, _IDLE, _IN_TRANSACTION)

    @property
    def stopped_before_commit(self) -> bool:
        """Whether the server refused what was sent with the COMMIT, and came to no COMMIT."""
        return self._stopped

    def _keep(self, sql: str, given: Parameters, *statuses: int) -> bool:
        if not self._may_combine(*statuses):
            return False
        if not self._send():  # another claim's
            raise ClaimLost
        self._last = (sql, given)
        # The outermost, so that it is not taken for another one's when that is removed.
        self._connection.execute_wrappers.insert(0, self._before_another)
        return True

    def commit(self) -> bool:
        """Send what was kept. ``False``: it found no row; the transaction must be rolled back."""
        self._rolls_back = self._connection.needs_rollback
        try:
            return self._rolls_back or self._send(last=True)
        except DatabaseFault as error:
            if self._is_lost(error):
                return False
            # After a COMMIT that failed, there is no transaction any more.
            self._stopped = self._status() == _IN_ERROR
            raise
        finally:
            self.over = True

    def end(self, *, committed: bool) -> None:
        """The transaction has ended: forget what was kept, take back what it had committed."""
        self.over = True
        self._take()
        if not self._undo or (committed and not self._rolls_back):
            return
        try:
            with self._connection.cursor() as cursor:
                for statement in self._undo:
                    cursor.execute(*statement)
        except DatabaseFault:
            logger.warning("A replay that was refused has been counted.", exc_info=True)

    def _before_another(self, execute: Callable[..., Any], *arguments: Any) -> Any:
        """Send what was kept for the end, where it turns out not to be the end."""
        if not self._send():
            raise ClaimLost
        return execute(*arguments)

    def _take(self) -> tuple[str, Parameters] | None:
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
            with ExitStack() as wrapped:
                if last and self._may_combine(_IDLE, _IN_TRANSACTION):
                    wrapped.enter_context(self._connection.execute_wrapper(if_written_with_commit))
                    if self._status() == _IDLE:
                        wrapped.enter_context(self._connection.execute_wrapper(with_begin))
                cursor.execute(*kept)
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
