"""The transactions of a store in a database, and what its errors mean."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Final, NoReturn

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
from ...records import Claim
from ..atomic_blocks import is_open, unpooled_connection
from ..base import Store
from .checks import NOT_MIGRATED
from .dialects import DIALECTS, Dialect, Pipeline


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
    rolled_back = rolled_back or dialect.has_ended(error)
    lost = isinstance(error, OperationalError | InterfaceError) or dialect.has_ended(error)
    if lost and dialect.is_busy(error):
        in_progress = OperationInProgress()
        in_progress.busy = dialect.locks_database
        return in_progress
    refused = isinstance(error, InternalError) and dialect.is_read_only(error)
    if lost or refused or dialect.is_function_gone(error):
        unavailable = StoreUnavailable()
        unavailable.rolled_back = rolled_back
        return unavailable
    return error


def raise_translated(dialect: Dialect, error: DatabaseFault) -> NoReturn:
    """Raise the store's error for one of the database's, if it has one; else that error."""
    better = translate_error(dialect, error)
    if better is error:
        raise error
    raise better from error


logger = logging.getLogger("idempotency_django")


REFUSED_MESSAGE: Final = (
    "The database could not commit because of a conflict with another transaction, and has "
    "rolled back. Retry later with the same key."
)


def statement_refused(statement: str, what: str) -> ImproperlyConfigured:
    """The error of a statement that would end the transaction that something runs in."""
    return ImproperlyConfigured(
        f"{statement[:40].strip()!r} would end the transaction that {what} runs in, so its "
        "effects and its answer would not commit together. Move the statement out of the "
        "view, or give the view's idempotency policy mode='leased'."
    )


def log_ended(what: str) -> None:
    """Tell that a transaction has ended unseen while something ran in it."""
    logger.error(
        "The transaction of %s ended while its view was running (executescript() "
        "commits, for example). Its effects so far are committed without its answer, "
        "and a crash or an error at this point leaves it interrupted. Move what "
        "commits out of the view, or give the view's idempotency policy "
        "mode='leased'.",
        what,
    )


_NO_AUTOCOMMIT: Final = (
    "{what} must be committed, but the database {using!r} is not in autocommit mode, so "
    "nothing is committed unless somebody calls commit(). Remove AUTOCOMMIT=False from DATABASES. "
    "After transaction.set_autocommit(False), call transaction.set_autocommit(True)."
)


def without_autocommit(
    using: str, what: str = "What an operation with an idempotency key does"
) -> ImproperlyConfigured:
    """The error of a database that commits nothing by itself."""
    return ImproperlyConfigured(_NO_AUTOCOMMIT.format(what=what, using=using))


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
            f"{what} must commit by itself, but a transaction is open around it on the "
            f"database {using!r}. Is it a transaction.atomic()? Then move it inside. Is "
            "it ATOMIC_REQUESTS? Then mark the view with transaction.non_atomic_requests."
        )


def restore_autocommit(using: str, name: str, *, commit: bool) -> None:
    """End the transaction that a leased view left open by leaving autocommit off.

    Its answer is stored with it, so that neither is there without the other.

    Args:
        using: the database.
        name: the operation's.
        commit: whether to commit what the view has not; else it is rolled back.
    """
    logger.warning(
        "%s left autocommit off on the database %r. What it had not committed was %s. Use "
        "transaction.atomic() in it, or call set_autocommit(True) at its end.",
        name,
        using,
        "committed with its answer" if commit else "rolled back",
    )
    connection = connections[using]
    (connection.commit if commit else connection.rollback)()
    connection.set_autocommit(True)


@dataclass(slots=True)
class StoreTransaction:
    """A transaction whose begin and commit raise the store's own errors.

    Args:
        dialect: of its database.
        whole: whether it holds all that is done. What a part of an operation has done elsewhere is
            not undone with it, so that one has never failed for certain.
        after: given by a caller who has opened the transaction already, and ends it.
    """

    dialect: Dialect
    whole: bool = False
    after: ExitStack | None = None
    _atomic: transaction.Atomic = field(init=False)
    _messages: Pipeline | None = field(default=None, init=False)
    _committed: list[bool] = field(default_factory=list, init=False)
    _ended: bool = field(default=False, init=False)

    def __enter__(self) -> None:
        dialect = self.dialect
        if self.whole and dialect.locks_sessions:
            if self.after is not None:  # one that is to roll back accepts no statement before
                self.after.callback(dialect.release)
            dialect.begin()
        self._atomic = transaction.atomic(using=dialect.using, savepoint=self.after is None)
        try:
            if dialect.combines:
                self._messages = dialect.messages()
            self._atomic.__enter__()
        except BaseException as error:
            self._finish()
            if isinstance(error, DatabaseFault):
                raise_translated(dialect, error)
            raise
        connection = connections[dialect.using]
        # Whoever has turned autocommit off by hand commits by hand.
        if not (connection.commit_on_exit or connection.settings_dict["AUTOCOMMIT"]):
            refusal = without_autocommit(dialect.using)
            self._end(type(refusal), refusal, None)
            raise refusal
        if len(connection.atomic_blocks) == 1:  # within others, no hook runs here
            note = partial(self._committed.append, True)  # the first of all hooks
            transaction.on_commit(note, using=dialect.using, robust=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        if error is not None:
            self._end(kind, error, trace)
            return
        try:
            kept = self._messages is None or self._messages.commit()
            if kept:
                self._end(None, None, None)
        except BaseException as fault:
            meaning = self._meaning(fault)
            if not self._ended:
                self._end(type(meaning), meaning, trace)
            if meaning is fault:
                raise
            raise meaning from fault
        if not kept:
            lost = ClaimLost()
            self._end(ClaimLost, lost, None)
            raise lost

    def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        self._ended = True
        try:
            self._atomic.__exit__(kind, error, trace)
        finally:
            if self._messages is not None or self.dialect.locks_sessions:
                self._finish()

    def _finish(self) -> None:
        """End what lasts as long as the transaction."""
        try:
            if self._messages is not None:
                self._messages.end()
        finally:
            if self.whole and self.after is None and self.dialect.locks_sessions:
                self.dialect.release()

    def _meaning(self, fault: BaseException) -> BaseException:
        """What it means that a commit has raised this."""
        if isinstance(fault, IdempotencyError):  # a hook's, after the commit
            fault.foreign = True
        if self._committed or not isinstance(fault, DatabaseFault):
            return fault
        if self.whole and self.dialect.is_busy(fault):
            return OperationInProgress(REFUSED_MESSAGE)
        stopped = self._messages is not None and self._messages.stopped_before_commit
        if stopped or self.dialect.has_ended(fault):
            return translate_error(self.dialect, fault, rolled_back=True)
        unsure = isinstance(fault, OperationalError | InterfaceError)
        return StoreUnavailable(UNCONFIRMED_MESSAGE) if unsure else fault


@dataclass(slots=True)
class TransactionGuard:
    """Refuses the statements that would end the running transaction, and logs where it has ended.

    What Django's cursors execute is looked at, and costs no statement. Scripts, stored procedures
    and the driver's own cursors are not seen.

    Args:
        dialect: of the transaction's database.
        what: what is executed in it.
    """

    dialect: Dialect
    what: str
    _connection: Any = field(init=False)

    def __enter__(self) -> None:
        self._connection = connections[self.dialect.using]
        self._connection.execute_wrappers.append(self._refuse)

    def __exit__(self, *raised: object) -> None:
        # By itself, not by its place: the handler may have added others, or removed ours.
        with suppress(ValueError):
            self._connection.execute_wrappers.remove(self._refuse)
        driver = self._connection.connection
        if driver is not None and not self.dialect.in_transaction(driver):
            log_ended(self.what)

    def _refuse(self, execute: Callable[..., Any], sql: Any, *arguments: Any) -> Any:
        text = sql if isinstance(sql, str) else self.dialect.text_of(sql)
        if self.dialect.ends_transaction(text):
            raise statement_refused(text, self.what)
        return execute(sql, *arguments)


class TransactionalStore(Store):
    """A store whose records commit, and roll back, with the effects in the same database.

    Attributes:
        using: the database.
        combine_statements: whether several statements may be sent in one message.
        functions: whether functions on the server may be called.
    """

    supports_transactions: ClassVar[bool] = True
    using: str
    combine_statements: bool
    functions: bool

    def transaction(self, *, after: ExitStack | None = None) -> AbstractContextManager[None]:
        return StoreTransaction(self._dialect, whole=True, after=after)

    def is_busy(self, error: BaseException) -> bool:
        return self._dialect.is_busy(error)

    def has_ended(self, error: BaseException) -> bool:
        return self._dialect.has_ended(error)

    def on_commit(self, function: Callable[[], object]) -> None:
        transaction.on_commit(function, using=self.using, robust=True)

    @contextmanager
    def dedicated_connection(self) -> Iterator[None]:
        with unpooled_connection(self.using):
            yield

    def guard_transaction(self, what: str) -> AbstractContextManager[None]:
        return TransactionGuard(self._dialect, what)

    @contextmanager
    def durable(self, what: str) -> Iterator[None]:
        with self._outside_transaction():
            forbid_atomic_block(self.using, what)
        with StoreTransaction(self._dialect):
            yield

    @contextmanager
    def fenced(self, claim: Claim) -> Iterator[None]:
        with StoreTransaction(self._dialect):
            yield
            # Last, so that nobody waits for an owner that is paused before it commits.
            with self._reachable():
                if not self._dialect.fence(claim):
                    raise ClaimLost

    @cached_property
    def _dialect(self) -> Dialect:
        vendor = connections[self.using].vendor
        if vendor not in DIALECTS:
            raise ImproperlyConfigured(
                f"DatabaseStore supports {', '.join(DIALECTS)}; the database {self.using!r} is "
                f"{vendor!r}."
            )
        return DIALECTS[vendor](
            self.using, combine=self.combine_statements, functions=self.functions
        )

    # The errors of the database. Where a first request passes, they are caught by hand: a block of
    # its own is two calls more for each reader of a stack.

    @contextmanager
    def _outside_transaction(self) -> Iterator[None]:
        """Outside a transaction: do not leave a broken connection to the next request."""
        try:
            yield
        except DatabaseFault as error:
            self._raise_outside_transaction(error)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Translate the database's errors of contention or connection into the store's."""
        try:
            yield
        except DatabaseFault as error:
            self._raise(error)

    def _raise_outside_transaction(self, error: DatabaseFault) -> NoReturn:
        connection = connections[self.using]
        try:
            self._raise(error)
        except (StoreUnavailable, OperationInProgress):
            if not connection.in_atomic_block:
                connection.close_if_unusable_or_obsolete()
            raise

    def _raise(self, error: DatabaseFault) -> NoReturn:
        raise_translated(self._dialect, error)
