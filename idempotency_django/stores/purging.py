"""Purging, batch by batch: for the command, the Celery task, or a loop of your own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from ..models import BATCH_SIZE
from .base import Store

__all__ = ["BATCH_SIZE", "Purgeable", "purge", "register_purge", "registered_purges"]


@dataclass(frozen=True, slots=True)
class Purgeable:
    """Something besides the stores that is purged with them, such as the messages of the outbox.

    Attributes:
        name: what is deleted, for people: ``"outbox messages"``.
        purge: deletes at most as many as its second argument says of those that became purgeable
            longer ago than its first; how many it has deleted.
        purgeable: how many it would delete, of those that became purgeable longer ago than its
            argument; for a dry run.
    """

    name: str
    purge: Callable[[timedelta, int], int]
    purgeable: Callable[[timedelta], int]


_registered: Final[dict[str, Purgeable]] = {}


def register_purge(
    name: str,
    purge: Callable[[timedelta, int], int],
    purgeable: Callable[[timedelta], int] = lambda _: 0,
) -> None:
    """Have the command and the task purge it, too; see :class:`Purgeable` for the arguments."""
    _registered[name] = Purgeable(name, purge, purgeable)


def registered_purges() -> list[Purgeable]:
    """All that is registered."""
    return list(_registered.values())


def purge(
    stores: Iterable[Store | Purgeable],
    *,
    older_than: timedelta = timedelta(0),
    batch_size: int = BATCH_SIZE,
    max_seconds: float | None = None,
) -> Iterator[int]:
    """Purge the stores, one after the other, and yield the size of each batch that was deleted.

    Each batch is atomic, so the purge can be stopped at any time. What becomes purgeable while it
    runs is left for the next purge, so it ends, however much traffic there is.

    Args:
        stores: what to purge: stores, or :func:`registered_purges`.
        older_than: only what became purgeable longer ago than this.
        batch_size: the most records to delete in one batch; at least 1.
        max_seconds: begin no batch after this many seconds; ``None``: no limit.

    Raises:
        ValueError: the batch size is less than 1.
    """
    if batch_size < 1:
        raise ValueError(f"The batch size must be at least 1, not {batch_size}.")
    started = time.monotonic()
    for store in stores:
        while max_seconds is None or time.monotonic() - started < max_seconds:
            elapsed = timedelta(seconds=time.monotonic() - started)
            deleted = store.purge(older_than + elapsed, batch_size)
            if not deleted:
                break
            yield deleted
