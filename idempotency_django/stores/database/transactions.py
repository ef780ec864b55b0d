"""The transactions of the database store, and the meaning of an error at their end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import InterfaceError, OperationalError, connections, transaction

from ...errors import (
    UNCONFIRMED_MESSAGE,
    IdempotencyError,
    OperationInProgress,
    StoreUnavailable,
)
from ..atomic_blocks import IN_NINJA, is_open
from .faults import Fault

if TYPE_CHECKING:
    from .dialects.base import Dialect

logger = logging.getLogger("idempotency_django")

NOT_MIGRATED: Final = (
    "The tables of idempotency_django are missing from the database {using!r}, or older than "
    "the code. Run: manage.py migrate idempotency_django --database {using}"
)
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
    fault = dialect.fault(error)
    match fault:
        case Fault.MISSING:
            return ImproperlyConfigured(NOT_MIGRATED.format(using=dialect.using))
        case Fault.TAKEN:  # by a transaction that this one's snapshot cannot see
            return OperationInProgress(REFUSED_MESSAGE)
        case Fault.BUSY:
            in_progress = OperationInProgress()
            in_progress.busy = dialect.locks_database
            return in_progress
        case Fault.ENDED | Fault.UNREACHABLE:
            unavailable = StoreUnavailable()
            unavailable.rolled_back = rolled_back or fault is Fault.ENDED
            return unavailable
        case None:
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
        self.was_stopped = False
        """Whether that statement was refused then, so that the COMMIT was not executed."""
        self.cursor: Any = None
        """The cursor of the claim, to complete it with as well, if statements are combined."""
        self.replayed: list[int] = []
        """The records whose replays are counted at its end, where it does nothing else."""
        self.holds_effects = False
        """Whether it executes operations, so that its COMMIT may not fail for a replay's count."""

    @classmethod
    def whole(cls, connection: Any) -> StoreTransaction | None:
        """The running transaction, if it is one of these, and whole."""
        blocks = connection.atomic_blocks
        is_ours = len(blocks) == 1 and isinstance(blocks[0], cls) and connection.commit_on_exit
        return blocks[0] if is_ours else None

    def __enter__(self) -> None:
        connection = self._connection = connections[self._dialect.using]
        if not connection.settings_dict["AUTOCOMMIT"]:
            raise without_autocommit(self._dialect.using)
        try:
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
        if isinstance(fault, IdempotencyError) and self.committed:  # a hook's, after the commit
            fault.foreign = True
        if self.committed or not isinstance(fault, DatabaseFault):
            return fault
        said = self._dialect.fault(fault)
        if self._spans_operation and said is Fault.BUSY:
            return OperationInProgress(REFUSED_MESSAGE)
        if self.was_stopped or said is Fault.ENDED:
            return translate_error(self._dialect, fault, rolled_back=True)
        unsure = isinstance(fault, OperationalError | InterfaceError)
        unsure = unsure or self._dialect.code(fault.__cause__) == _NO_TRANSACTION
        return StoreUnavailable(UNCONFIRMED_MESSAGE) if unsure else fault
