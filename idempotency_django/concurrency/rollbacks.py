"""Objects in memory that follow their rows when a transaction is rolled back."""

from __future__ import annotations

from collections.abc import Callable

from django.db import connections, transaction


class _Undo:
    """A hook for ``on_commit()`` that undoes something if it is dropped without being called.

    Django has no hook for a rollback. But it drops the hooks of a transaction or savepoint that is
    rolled back, the newest first, and nothing else holds them: their end is the rollback. Where
    another hook raises after the commit, Django drops those behind it, too. Then something is
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
