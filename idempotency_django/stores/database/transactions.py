"""The transactions of the database store, and the meaning of the errors in them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import InterfaceError, InternalError, OperationalError, connections, transaction

from ...errors import (
    UNCONFIRMED_MESSAGE,
    IdempotencyError,
    OperationInProgress,
    StoreUnavailable,
)
from ..atomic_blocks import IN_NINJA, is_open
from .checks import NOT_MIGRATED

if TYPE_CHECKING:
    from .dialects.base import Dialect

logger = logging.getLogger("idempotency_django")

_NO_TRANSACTION: Final = "25P01"
"""PostgreSQL's code where the transaction was ended unseen, and a savepoint went with it."""

REFUSED_MESSAGE: Final = (
    "The database could not commit because of a conflict with another transaction, and has "
    "rolled back. Retry later with the same key."
)


def translate_error(
    dialect: Dialect, error: DatabaseFault, *, rolled_back: bool = False
) -> Exception:
    """The store's error for one of the database's, if it has one; else that error.

    Args:
        dialect: knows what the error says.
        error: the database's.
        rolled_back: whether it is known that nothing was committed.
    """
    if dialect.is_missing(error):
        return ImproperlyConfigured(NOT_MIGRATED.format(using=dialect.using))
    if dialect.is_taken(error):  # by a transaction that this one's snapshot cannot see
        return OperationInProgress(REFUSED_MESSAGE)
    ended = dialect.was_ended_by_server(error)
    lost = ended or isinstance(error, OperationalError | InterfaceError)
    if lost and dialect.is_busy(error):
        in_progress = OperationInProgress()
        in_progress.busy = dialect.locks_database
        return in_progress
    refused = isinstance(error, InternalError) and dialect.is_read_only(error)
    if lost or refused:
        unavailable = StoreUnavailable()
        unavailable.rolled_back = rolled_back or ended
        return unavailable
    return error


def raise_translated(dialect: Dialect, error: DatabaseFault) -> NoReturn:
    """Raise the store's error for one of the database's, if it has one; else that error."""
    better = translate_error(dialect, error)
    if better is error:
        raise error
    raise better from error


def without_autocommit(
    using: str, what: str = "An operation with an idempotency key"
) -> ImproperlyConfigured:
    """The error of a database that commits nothing on its own."""
    return ImproperlyConfigured(
        f"{what} must be committed, but the database {using!r} is not in autocommit mode. Remove "
        "AUTOCOMMIT=False from DATABASES. After transaction.set_autocommit(False), call "
        "transaction.set_autocommit(True)."
    )


def forbid_atomic_block(using: str, what: str) -> None:
    """Refuse a transaction around what must commit when it ends.

    Args:
        using: the database.
        what: what commits, for the error.

    Raises:
        ImproperlyConfigured: there is one, or the database is not in autocommit mode.
    """
    connection = connections[using]
    if not connection.in_atomic_block:
        if not connection.get_autocommit():
            raise without_autocommit(using, what)
    elif is_open(using):
        raise ImproperlyConfigured(
            f"{what} must commit on its own, but a transaction is open on the database {using!r}. "
            "If it is a transaction.atomic(), move it inside. If it is ATOMIC_REQUESTS, mark the "
            f"view with transaction.non_atomic_requests. {IN_NINJA}"
        )


class StoreTransaction(transaction.Atomic):
    """A transaction whose begin and commit raise the store's own errors.

    Its last statement may be sent in one message with its COMMIT, if it is a whole one: no other
    surrounds it.

    Args:
        dialect: of its database.
        spans_operation: whether it holds all that the operation does. What an operation has done
            elsewhere is not undone with a part of it, so that a part has never failed for certain.
    """

    def __init__(self, dialect: Dialect, *, spans_operation: bool = False) -> None:
        super().__init__(dialect.using, savepoint=True, durable=False)
        self._dialect = dialect
        self._spans_operation = spans_operation
        self.committed = False
        """Whether it is known to be committed."""
        self.sent_commit = False
        """Whether its last statement has failed together with the COMMIT."""
        self._stopped = False
        self.cursor: Any = None
        """The cursor of the claim, to complete it with as well, if statements are combined."""
        self.replayed: list[int] = []
        """The records whose replays are counted at its end."""

    @classmethod
    def whole(cls, connection: Any) -> StoreTransaction | None:
        """The running transaction, if it is one of these, and whole."""
        blocks = connection.atomic_blocks
        is_ours = len(blocks) == 1 and isinstance(blocks[0], cls) and connection.commit_on_exit
        return blocks[0] if is_ours else None

    def fail_to_commit(self, *, stopped: bool) -> None:
        """Note that the last statement has failed together with the COMMIT.

        Args:
            stopped: whether the statement was refused, so that the COMMIT was not executed.
        """
        self.sent_commit, self._stopped = True, stopped

    def __enter__(self) -> None:
        connection = self._connection = connections[self._dialect.using]
        try:
            if not (connection.settings_dict["AUTOCOMMIT"] or _commits(connection)):
                raise without_autocommit(self._dialect.using)
            super().__enter__()
        except DatabaseFault as error:
            raise_translated(self._dialect, error)
        if len(connection.atomic_blocks) == 1:  # within others, no hook runs here
            connection.on_commit(self._note_commit, robust=True)  # the first of all hooks

    def _note_commit(self) -> None:
        self.committed = True

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None and self.replayed and not self._connection.needs_rollback:
            count = self._dialect.count(self.replayed)
            try:
                self._dialect.execute_last(count, *self.replayed, unsure=False)
            except DatabaseFault as fault:
                logger.warning("A replay was not counted.", exc_info=True)
                super().__exit__(type(fault), fault, None)
                return
        try:
            super().__exit__(kind, error, trace)
        except BaseException as fault:
            meaning = self._meaning(fault)
            if meaning is fault:
                raise
            raise meaning from fault
        if self.sent_commit and isinstance(error, DatabaseFault):
            meaning = self._meaning(error)
            if meaning is not error:
                raise meaning from error

    def _meaning(self, fault: BaseException) -> BaseException:
        """The error that a commit which raised this stands for."""
        dialect = self._dialect
        if isinstance(fault, IdempotencyError) and self.committed:  # a hook's, after the commit
            fault.foreign = True
        if self.committed or not isinstance(fault, DatabaseFault):
            return fault
        if self._spans_operation and dialect.is_busy(fault):
            return OperationInProgress(REFUSED_MESSAGE)
        if self._stopped or dialect.was_ended_by_server(fault):
            return translate_error(dialect, fault, rolled_back=True)
        unsure = isinstance(fault, OperationalError | InterfaceError)
        unsure = unsure or dialect.code(fault.__cause__) == _NO_TRANSACTION
        return StoreUnavailable(UNCONFIRMED_MESSAGE) if unsure else fault


def _commits(connection: Any) -> bool:
    """Whether what is written on a connection is committed."""
    if connection.in_atomic_block:
        return bool(connection.commit_on_exit)
    return bool(connection.get_autocommit())
