"""Purging, batch by batch: for the command, the Celery task, or a loop of your own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final

from ..models import BATCH_SIZE
from .base import stores

__all__ = ["BATCH_SIZE", "purge", "register_purge"]

Purge = Callable[[timedelta, int], int]

_registered: Final[list[Purge]] = []


def register_purge(purge: Purge) -> None:
    """Purge something else with the stores, such as the messages of the outbox.

    Args:
        purge: deletes at most as many as its second argument says of those that became purgeable
            longer ago than its first; how many it has deleted.
    """
    _registered.append(purge)


def purge(*, batch_size: int = BATCH_SIZE) -> Iterator[int]:
    """Purge every store, and all that is registered; yield the size of each batch that was deleted.

    Each batch is atomic, so the purge can be stopped at any time. What becomes purgeable while it
    runs is left for the next purge, so it ends, however much traffic there is.

    Args:
        batch_size: the most records to delete in one batch; at least 1.

    Raises:
        ValueError: the batch size is less than 1.
    """
    if batch_size < 1:
        raise ValueError(f"The batch size must be at least 1, not {batch_size}.")
    started = time.monotonic()
    for delete in [*(store.purge for store in stores.all()), *_registered]:
        while deleted := delete(timedelta(seconds=time.monotonic() - started), batch_size):
            yield deleted
