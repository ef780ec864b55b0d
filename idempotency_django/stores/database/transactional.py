"""The transactions of a store in a database, and what its errors mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import ClassVar, Final, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import InterfaceError, OperationalError, connections, transaction

from ...errors import ClaimLost, IdempotencyError, OperationInProgress, StoreUnavailable
from ...records import Claim
from ..atomic_blocks import outside_pools
from ..base import Store
from .dialects import DIALECTS, Dialect
from .faults import raise_translated
from .transactions import forbid_atomic_block, unbroken, without_autocommit

UNCONFIRMED_MESSAGE: Final = (
    "The database did not confirm the commit of the operation, so nobody knows whether it was "
    "committed. Retry later with the same key: the retry gets the answer, or executes the "
    "operation."
)

_REFUSED: Final = (
    "The database could not commit because of a conflict with another transaction, and has "
    "rolled back. Retry later with the same key."
)


class TransactionalStore(Store):
    """A store whose records commit, and roll back, with the effects in the same database.

    Attributes:
        using: the database.
        combine_statements: whether several statements may be sent in one message.
    """

    supports_transactions: ClassVar[bool] = True
    using: str
    combine_statements: bool

    @contextmanager
    def transaction(self, *, after: ExitStack | None = None) -> Iterator[None]:
        with ExitStack() as stack:
            # A transaction that is to roll back accepts no statement before its end.
            (after or stack).callback(self._dialect.release)
            self._dialect.begin()
            with self._transaction(savepoint=after is None, whole=True):
                yield

    def is_busy(self, error: BaseException) -> bool:
        return self._dialect.is_busy(error)

    def on_commit(self, function: Callable[[], object]) -> None:
        transaction.on_commit(function, using=self.using, robust=True)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        with outside_pools(self.using):
            yield

    def unbroken(self, what: str) -> AbstractContextManager[None]:
        return unbroken(self._dialect, what)

    @contextmanager
    def durable(self, what: str) -> Iterator[None]:
        with self._on_its_own():
            forbid_atomic_block(self.using, what)
        with self._transaction():
            yield

    @contextmanager
    def fenced(self, claim: Claim) -> Iterator[None]:
        with self._transaction():
            yield
            # Last, so that nobody waits for an owner that is paused before it commits.
            with self._reachable():
                if not self._dialect.fence(claim):
                    raise ClaimLost

    @contextmanager
    def _transaction(self, *, savepoint: bool = True, whole: bool = False) -> Iterator[None]:
        """A transaction whose begin and commit raise the store's own errors.

        ``whole``: it holds all that was done. What a part of an operation has done elsewhere is
        not undone with it, so that one has never failed for certain.
        """
        with ExitStack() as stack:
            messages = stack.enter_context(self._dialect.messages())
            with self._reachable():
                stack.enter_context(transaction.atomic(using=self.using, savepoint=savepoint))
            connection = connections[self.using]
            # Whoever has turned autocommit off by hand commits by hand.
            if not (connection.commit_on_exit or connection.settings_dict["AUTOCOMMIT"]):
                raise without_autocommit(self.using)
            committed: list[bool] = []
            if len(connections[self.using].atomic_blocks) == 1:  # within others, no hook runs here
                self.on_commit(lambda: committed.append(True))  # the first of all hooks
            yield
            try:
                lost = not messages.commit()
                if not lost:
                    stack.close()
            except IdempotencyError as error:  # a hook's, after the commit
                error.foreign = True
                raise
            except DatabaseFault as error:
                if committed:  # another hook has raised it
                    raise
                if whole and self._dialect.is_busy(error):
                    raise OperationInProgress(_REFUSED) from error
                if messages.stopped_before_commit:
                    raise_translated(self._dialect, error, rolled_back=True)
                if not isinstance(error, OperationalError | InterfaceError):
                    raise
                raise StoreUnavailable(UNCONFIRMED_MESSAGE) from error
            if lost:
                raise ClaimLost

    @cached_property
    def _dialect(self) -> Dialect:
        vendor = connections[self.using].vendor
        if vendor not in DIALECTS:
            raise ImproperlyConfigured(
                f"DatabaseStore supports {', '.join(DIALECTS)}; the database {self.using!r} is "
                f"{vendor!r}."
            )
        return DIALECTS[vendor](self.using, combine=self.combine_statements)

    # The errors of the database. Where a first request passes, they are caught by hand: a block of
    # its own is two calls more for each reader of a stack.

    @contextmanager
    def _on_its_own(self) -> Iterator[None]:
        """Outside a transaction: do not leave a broken connection to the next request."""
        try:
            yield
        except DatabaseFault as error:
            self._raise_on_its_own(error)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Translate the database's errors of contention or connection into the store's."""
        try:
            yield
        except DatabaseFault as error:
            self._raise(error)

    def _raise_on_its_own(self, error: DatabaseFault) -> NoReturn:
        connection = connections[self.using]
        try:
            self._raise(error)
        except (StoreUnavailable, OperationInProgress):
            if not connection.in_atomic_block:
                connection.close_if_unusable_or_obsolete()
            raise

    def _raise(self, error: DatabaseFault) -> NoReturn:
        raise_translated(self._dialect, error)
