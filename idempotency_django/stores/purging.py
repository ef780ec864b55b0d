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
    """

    name: str
    purge: Callable[[timedelta, int], int]


_registered: Final[dict[str, Purgeable]] = {}


def register_purge(name: str, purge: Callable[[timedelta, int], int]) -> None:
    """Have the command and the task purge it, too; see :class:`Purgeable` for the arguments."""
    _registered[name] = Purgeable(name, purge)


def registered_purges() -> list[Purgeable]:
    """All that is registered."""
    return list(_registered.values())


def purge(stores: Iterable[Store | Purgeable], *, batch_size: int = BATCH_SIZE) -> Iterator[int]:
    """Purge the stores, one after the other, and yield the size of each batch that was deleted.

    Each batch is atomic, so the purge can be stopped at any time. What becomes purgeable while it
    runs is left for the next purge, so it ends, however much traffic there is.

    Args:
        stores: what to purge: stores, or :func:`registered_purges`.
        batch_size: the most records to delete in one batch; at least 1.

    Raises:
        ValueError: the batch size is less than 1.
    """
    if batch_size < 1:
        raise ValueError(f"The batch size must be at least 1, not {batch_size}.")
    started = time.monotonic()
    for store in stores:
        while deleted := store.purge(timedelta(seconds=time.monotonic() - started), batch_size):
            yield deleted
