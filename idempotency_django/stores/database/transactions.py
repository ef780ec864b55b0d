"""The transactions of the database store, and the meaning of the errors in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Final, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import InterfaceError, InternalError, OperationalError, connections, transaction

from ...errors import (
    UNCONFIRMED_MESSAGE,
    ClaimLost,
    IdempotencyError,
    OperationInProgress,
    StoreUnavailable,
)
from ..atomic_blocks import IN_NINJA, is_open
from .checks import NOT_MIGRATED
from .dialects import Dialect, Pipeline

_NO_TRANSACTION: Final = "25P01"
"""PostgreSQL's code where the transaction was ended unseen, and a savepoint went with it."""


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


REFUSED_MESSAGE: Final = (
    "The database could not commit because of a conflict with another transaction, and has "
    "rolled back. Retry later with the same key."
)


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


@dataclass(slots=True)
class StoreTransaction:
    """A transaction whose begin and commit raise the store's own errors.

    Args:
        dialect: of its database.
        spans_operation: whether it holds all that the operation does. What an operation has done
            elsewhere is not undone with a part of it, so that a part has never failed for certain.
    """

    dialect: Dialect
    spans_operation: bool = False
    _atomic: transaction.Atomic = field(init=False)
    _pipeline: Pipeline | None = field(default=None, init=False)
    _committed: list[bool] = field(default_factory=list, init=False)

    def __enter__(self) -> None:
        dialect = self.dialect
        if self.spans_operation:
            dialect.begin()
        self._atomic = transaction.atomic(using=dialect.using)
        try:
            self._pipeline = dialect.new_pipeline()
            self._atomic.__enter__()
        except BaseException as error:
            self._finish()
            if isinstance(error, DatabaseFault):
                raise_translated(dialect, error)
            raise
        connection = connections[dialect.using]
        # A project that has turned autocommit off by hand commits by hand.
        if not (connection.commit_on_exit or connection.settings_dict["AUTOCOMMIT"]):
            refusal = without_autocommit(dialect.using)
            self._end(refusal)
            raise refusal
        if len(connection.atomic_blocks) == 1:  # within others, no hook runs here
            note = partial(self._committed.append, True)  # the first of all hooks
            transaction.on_commit(note, using=dialect.using, robust=True)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._end(error)
            return
        ended = False
        try:
            if self._pipeline is not None and not self._pipeline.commit():
                raise ClaimLost
            ended = True
            self._end(None)
        except BaseException as fault:
            meaning = self._meaning(fault)
            if not ended:
                self._end(meaning)
            if meaning is fault:
                raise
            raise meaning from fault

    def _end(self, error: BaseException | None) -> None:
        try:
            self._atomic.__exit__(None if error is None else type(error), error, None)
        finally:
            self._finish()

    def _finish(self) -> None:
        """End what lasts as long as the transaction."""
        try:
            if self._pipeline is not None:
                self._pipeline.end()
        finally:
            if self.spans_operation:
                self.dialect.release()

    def _meaning(self, fault: BaseException) -> BaseException:
        """The error that a commit which raised this stands for."""
        if isinstance(fault, IdempotencyError) and self._committed:  # a hook's, after the commit
            fault.foreign = True
        if self._committed or not isinstance(fault, DatabaseFault):
            return fault
        if self.spans_operation and self.dialect.is_busy(fault):
            return OperationInProgress(REFUSED_MESSAGE)
        stopped = self._pipeline is not None and self._pipeline.stopped_before_commit
        if stopped or self.dialect.was_ended_by_server(fault):
            return translate_error(self.dialect, fault, rolled_back=True)
        unsure = isinstance(fault, OperationalError | InterfaceError)
        unsure = unsure or self.dialect.code(fault.__cause__) == _NO_TRANSACTION
        return StoreUnavailable(UNCONFIRMED_MESSAGE) if unsure else fault
