"""``ATOMIC_REQUESTS``: the request's transaction, opened by the adapter instead of by Django.

Django opens it around the view, where an adapter cannot see that it has rolled back. An adapter
must see it, because it records the end of an attempt after the rollback. So it makes Django leave
the view alone and opens the same transactions itself, around the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final

from django.db import DatabaseError, connections, transaction

from ..engine.outcomes import UNCERTAIN_ERRORS
from ..engine.transactional import Atomic
from ..errors import OperationInProgress, StoreUnavailable
from ..stores import Store


class ExcludedDatabases(set[str]):
    """The databases that a view's author took out of ``ATOMIC_REQUESTS``.

    As the view's ``_non_atomic_requests`` it answers Django's question whether to leave out a
    database with yes for every one, while ``transaction.non_atomic_requests`` goes on adding to it.
    """

    def __contains__(self, alias: object) -> bool:
        return True


def take_over_transactions(view: Callable[..., Any]) -> ExcludedDatabases:
    """Take over the transactions that Django would open around the view."""
    owned = ExcludedDatabases(getattr(view, "_non_atomic_requests", ()))
    view._non_atomic_requests = owned  # type: ignore[attr-defined]  # Django's own mark
    return owned


class RequestTransactions(Atomic):
    """The transactions that are open around a request, and what waits for their end.

    Attributes:
        aliases: the databases that they are on. Most projects have none: then it is one object for
            all requests, which need not be entered.
    """

    def __init__(self, aliases: list[str]) -> None:
        self.aliases = aliases
        self._after = ExitStack()
        self._open: dict[str, AbstractContextManager[None]] = {}
        self._last: str | None = None
        self._store: Store | None = None
        self._spared = False
        self._ended = False

    def __enter__(self) -> RequestTransactions:
        with ExitStack() as begun:
            for alias in self.aliases:
                atomic = transaction.atomic(using=alias)
                begun.enter_context(atomic)
                self._open[alias] = atomic
            begun.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        if not self.aliases:
            return
        error: BaseException | None = raised[1]
        reported = self._rollback() if error is None else _certain(error)
        try:
            self._end(*raised)
        except BaseException as at_end:
            known = error is not None or self._spared or self._is_busy(at_end)
            reported = _certain(at_end) if known else at_end
            raise
        finally:
            self._after.__exit__(None if reported is None else type(reported), reported, None)

    def around_claim(self, store: Store) -> ExitStack | None:
        """The callbacks to run when the store's transaction has ended; ``None`` if none is open.

        That transaction is committed last, so that no answer outlives its effects on another
        database. If it is not open yet, it is begun here. If it was rolled back, the callbacks are
        told why. After an operational error, that is unknown.

        Raises:
            OperationInProgress: the store's database is too busy to begin one.
            StoreUnavailable: it cannot be reached.
        """
        if store.using is None or not self.aliases:
            return None
        self._last, self._store = store.using, store
        if store.using not in self._open:
            self._begin(store.using)
        return self._after

    def _begin(self, alias: str) -> None:
        atomic = transaction.atomic(using=alias)
        try:
            atomic.__enter__()
        except UNCERTAIN_ERRORS as error:
            raise (OperationInProgress if self._is_busy(error) else StoreUnavailable) from error
        self._open[alias] = atomic

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Commit what is open for the length of the block, and begin the same again after it."""
        anew = list(self._open)
        self._end(None, None, None)
        self._after.close()
        yield
        for alias in anew:
            self._begin(alias)

    def around_handler(self, store: Store) -> AbstractContextManager[bool]:
        """Commit what is open, and give the same transactions to be begun later.

        The one on the store's database is committed last.
        """
        if not self.aliases:
            return super().around_handler(store)
        self._end(None, None, None)
        self._ended = True
        return self._begun(store)

    @contextmanager
    def _begun(self, store: Store) -> Iterator[bool]:
        others = [alias for alias in self.aliases if alias != store.using]
        is_shared = store.using in self.aliases
        with store.transaction() if is_shared else nullcontext(), _atomic(others):
            yield is_shared

    def own_transactions(self) -> AbstractContextManager[None]:
        """For what rolls back the request's transactions, as REST framework's handler of errors.

        Where they have ended it would spoil a test's, in which they were: it gets its own there.
        """
        open_ones = [alias for alias in self.aliases if connections[alias].in_atomic_block]
        return _atomic(open_ones) if self._ended else nullcontext()

    def _rollback(self) -> Exception | None:
        """If the store's transaction is to roll back, roll back all; the reason for callbacks.

        Without a store, as where a request has no key, each rolls back for itself.
        """
        deciding = self._open if self._last is None else [self._last]
        if not any(connections[alias].needs_rollback for alias in deciding):
            return None
        if self._last is not None:
            for alias in self._open:
                transaction.set_rollback(True, using=alias)
        return transaction.TransactionManagementError("The transaction was marked for rollback.")

    def _end(self, *raised: Any) -> None:
        begun, self._open = self._open, {}
        ending = ExitStack()  # first in, last out
        if self._last in begun:
            ending.push(begun.pop(self._last))
            ending.push(self._before_the_last)
        for atomic in begun.values():
            ending.push(atomic)
        ending.__exit__(*raised)

    def _before_the_last(self, _: object, error: BaseException | None, __: object) -> None:
        self._spared = error is not None  # then the last one is not even tried to be committed

    def _is_busy(self, error: BaseException) -> bool:
        """Whether the COMMIT failed because of a conflict: then it has rolled back."""
        return self._store is not None and self._store.is_busy(error)


def _certain(error: BaseException) -> BaseException:
    """The error, where it is known that all has rolled back."""
    unsure = isinstance(error, UNCERTAIN_ERRORS)
    return DatabaseError(*error.args) if unsure else error


@contextmanager
def _atomic(aliases: list[str]) -> Iterator[None]:
    with ExitStack() as atomics:
        for alias in aliases:
            atomics.enter_context(transaction.atomic(using=alias))
        yield


def request_transactions(excluded: set[str]) -> RequestTransactions:
    """The transactions that ``ATOMIC_REQUESTS`` asks for, without the excluded databases."""
    aliases = []
    for alias, settings in connections.settings.items():
        # An ExcludedDatabases is asked for its members: it says yes to any `in`.
        if settings["ATOMIC_REQUESTS"] and alias not in set(iter(excluded)):
            aliases.append(alias)
    return RequestTransactions(aliases) if aliases else NONE


def asks_for_transaction(view: Callable[..., Any]) -> bool:
    """Whether ``ATOMIC_REQUESTS`` asks for a transaction around the view."""
    return bool(request_transactions(getattr(view, "_non_atomic_requests", set())).aliases)


NONE: Final = RequestTransactions([])
"""No transactions, as most projects have it."""
