"""Locks of rows, the transactions that they are held in, and their rollbacks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from django.db import connections, models, router, transaction


def in_transaction(using: str) -> AbstractContextManager[None]:
    """The transaction that is open, or a new one."""
    is_open = connections[using].in_atomic_block
    return nullcontext() if is_open else transaction.atomic(using=using)


def write_alias(obj: models.Model) -> str:
    """The database that the object is written to."""
    return router.db_for_write(type(obj), instance=obj)


def lock(obj: models.Model, using: str) -> None:
    """Lock the object's row until the transaction's end, and give the object its values.

    Raises:
        ObjectDoesNotExist: there is no row.
    """
    rows = type(obj)._base_manager.using(using).select_for_update()
    everything = [field.name for field in obj._meta.concrete_fields]  # what was deferred, too
    obj.refresh_from_db(using=using, fields=everything, from_queryset=rows)


class _Undo:
    """A hook for ``on_commit()`` that undoes something if it is dropped without being called.

    Django has no hook for a rollback. But it drops the hooks of a transaction or savepoint that is
    rolled back, the newest first, and nothing else holds them: their end is the rollback. Where
    another hook raises after the commit, Django drops those after it, too. Then something is
    undone that need not be: the next write is refused as stale, and none is lost.
    """

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo: Callable[[], object] | None = undo

    def __call__(self) -> None:
        self._undo = None

    def __del__(self) -> None:
        if self._undo is not None:
            self._undo()


def on_rollback(using: str, undo: Callable[[], object]) -> None:
    """Call ``undo`` if the transaction or the savepoint that is open now is rolled back."""
    if connections[using].in_atomic_block:
        transaction.on_commit(_Undo(undo), using=using)


def refuse_marked(using: str, what: str) -> None:
    """Refuse to report a success if the transaction that is open is going to be rolled back.

    Django rolls back a marked transaction without a word.

    Args:
        using: the database.
        what: was executed in the transaction, as the first word of the error.

    Raises:
        TransactionManagementError: the transaction is marked for rollback.
    """
    connection = connections[using]
    if connection.in_atomic_block and connection.needs_rollback:
        raise transaction.TransactionManagementError(
            f"{what} ended without an error, but its transaction is marked for rollback, so "
            "nothing was changed. If it catches a database error, wrap the failing statements in "
            "their own atomic() and catch the error outside of that. If it calls "
            "set_rollback(True), raise an exception instead."
        )
