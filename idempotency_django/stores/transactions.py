"""The transactions around a claim: the database store's own, and those that must not be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import InterfaceError, OperationalError, connections, transaction

from ..errors import (
    REFUSED_MESSAGE,
    UNCONFIRMED_MESSAGE,
    IdempotencyError,
    OperationInProgress,
    StoreUnavailable,
)

if TYPE_CHECKING:
    from .dialects import Dialect

IN_NINJA: Final = "In django-ninja, which ignores this mark, turn ATOMIC_REQUESTS off."
"""The end of the errors that advise ``transaction.non_atomic_requests``."""

SHARED: Final = ("pool", "isolation_level")
"""Options of a database that its other users need, but a heartbeat must not use."""


# Surroundings: open transactions, pools of connections.


@contextmanager
def unpooled_connection(using: str, *, schema: object = None) -> Iterator[None]:
    """In the block, this thread has a connection of its own to the database, not from a pool.

    It sees what others have committed so far, at any isolation level.

    Args:
        using: the database.
        schema: the schema of a tenant, of django-tenants; ``None``: there are no tenants.
    """
    usual = connections[using]
    settings = dict(usual.settings_dict)
    settings["OPTIONS"] = {k: v for k, v in settings["OPTIONS"].items() if k not in SHARED}
    own: Any = type(usual)(settings, using)
    connections[using] = own
    if schema is not None:
        own.set_schema(schema)
    try:
        yield
    finally:
        connections[using] = usual
        own.close()


def is_open(using: str) -> bool:
    """Whether a transaction is open on the database; a test's, which stands for none, is not."""
    if not connections[using].in_atomic_block:
        return False
    try:
        with transaction.atomic(using=using, durable=True, savepoint=False):
            return False
    except RuntimeError:
        return True


def forbid_transactions(what: str) -> None:
    """Refuse a claim within a transaction, for a store that takes part in no transaction.

    The response would be there before the effects are committed, and stay if they roll back.

    Raises:
        ImproperlyConfigured: a transaction is open on some database.
    """
    for connection in connections.all(initialized_only=True):
        if is_open(connection.alias):
            raise ImproperlyConfigured(
                f"{what} is in a store without transactions, but a transaction is open on the "
                f"database {connection.alias!r}. If it rolls back, the result is stored without "
                "its effects. If it is a transaction.atomic(), move it inside. If it is "
                "ATOMIC_REQUESTS, mark the view with transaction.non_atomic_requests. "
                f"{IN_NINJA}"
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


_NO_TRANSACTION: Final = "25P01"
"""PostgreSQL's code where the transaction was ended unseen, and a savepoint went with it."""


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

    @classmethod
    def whole(cls, connection: Any) -> StoreTransaction | None:
        """The running transaction, if it is one of these, and whole."""
        blocks = connection.atomic_blocks
        is_ours = len(blocks) == 1 and isinstance(blocks[0], cls) and connection.commit_on_exit
        return blocks[0] if is_ours else None

    def __enter__(self) -> None:
        connection = connections[self._dialect.using]
        if not connection.settings_dict["AUTOCOMMIT"]:
            raise without_autocommit(self._dialect.using)
        try:
            super().__enter__()
        except DatabaseFault as error:
            self._dialect.raise_translated(error)
        if len(connection.atomic_blocks) == 1:  # within others, no hook runs here
            connection.on_commit(self._note_commit, robust=True)  # the first of all hooks

    def _note_commit(self) -> None:
        self.committed = True

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
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
        if self._spans_operation and self._dialect.is_busy(fault):
            return OperationInProgress(REFUSED_MESSAGE)
        better = self._dialect.translated(fault, rolled_back=self.was_stopped)
        if self.was_stopped or getattr(better, "rolled_back", False):
            return better
        unsure = isinstance(fault, OperationalError | InterfaceError)
        unsure = unsure or self._dialect.code(fault.__cause__) == _NO_TRANSACTION
        return StoreUnavailable(UNCONFIRMED_MESSAGE) if unsure else fault
