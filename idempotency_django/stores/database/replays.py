"""Replays are counted in the audit trail, and may begin a record's time to live again."""

from __future__ import annotations

import logging
from typing import Any

from django.db import Error as DatabaseFault
from django.db import connections, transaction
from django.db.models import F

from ...models import DatabaseNow, IdempotencyKeyQuerySet
from ...records import Operation
from .rows import lifetime

logger = logging.getLogger("idempotency_django")


def record_replay(row: IdempotencyKeyQuerySet, key: str, operation: Operation) -> None:
    """Note a replay of a row, now or after the running transaction, as the operation asks.

    It neither raises nor waits: a replay that cannot be counted at once is not counted.

    Args:
        row: the row alone.
        key: its key, for the log.
        operation: what is replayed.
    """

    def count() -> None:
        try:
            _count(row, operation)
        except DatabaseFault:
            logger.warning("A replay of %s was not counted.", key, exc_info=True)

    if connections[row.db].vendor == "sqlite":
        count()  # this transaction holds SQLite's one write lock; a later one would wait for it
    else:
        # On its own, so that its row lock is gone at once and its failure fails nothing else.
        transaction.on_commit(count, using=row.db, robust=True)


def _count(row: IdempotencyKeyQuerySet, operation: Operation) -> None:
    changes: dict[str, Any] = {}
    if operation.count_replays:
        changes |= {"replay_count": F("replay_count") + 1, "last_replayed_at": DatabaseNow()}
    if operation.extend_on_replay:
        changes |= lifetime(operation)
    skip = connections[row.db].features.has_select_for_update_skip_locked
    with transaction.atomic(using=row.db):
        if row.select_for_update(skip_locked=skip).exists():
            row.update(**changes)
