"""Replays are counted in the audit trail, and may begin a record's time to live again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from django.db import Error as DatabaseFault
from django.db import connections, transaction
from django.db.models import F

from ...models import DatabaseNow, IdempotencyKeyQuerySet
from ...records import Operation, Record
from .rows import lifetime

logger = logging.getLogger("idempotency_django")


def record_replays(
    rows: IdempotencyKeyQuerySet, replays: Sequence[tuple[Record, Operation]]
) -> None:
    """Note replays, now or after the running transaction, as their operations ask.

    It neither raises nor waits: a replay that cannot be counted at once is not counted.

    Args:
        rows: all rows.
        replays: what is replayed, and for which operation.
    """
    alike: dict[object, list[tuple[Record, Operation]]] = {}
    for record, operation in replays:
        if operation.count_replays or operation.extend_on_replay:
            alike.setdefault(_written(operation), []).append((record, operation))
    for group in alike.values():
        _record(rows, [record for record, _ in group], group[0][1])


def _written(operation: Operation) -> object:
    """What the row of a replay depends on: the same for all operations of one policy."""
    lifetime = (operation.ttl, operation.retention) if operation.extend_on_replay else None
    return operation.count_replays, lifetime


def _record(rows: IdempotencyKeyQuerySet, records: list[Record], operation: Operation) -> None:
    def count() -> None:
        try:
            _count(rows, [record.record_id for record in records], operation)
        except DatabaseFault:
            keys = ", ".join(record.key for record in records)
            logger.warning("A replay of %s was not counted.", keys, exc_info=True)

    if connections[rows.db].vendor == "sqlite":
        count()  # this transaction holds SQLite's one write lock; a later one would wait for it
    else:
        # On its own, so that its row locks are gone at once and its failure fails nothing else.
        transaction.on_commit(count, using=rows.db, robust=True)


def _count(rows: IdempotencyKeyQuerySet, ids: list[int], operation: Operation) -> None:
    changes: dict[str, Any] = {}
    if operation.count_replays:
        changes |= {"replay_count": F("replay_count") + 1, "last_replayed_at": DatabaseNow()}
    if operation.extend_on_replay:
        changes |= lifetime(operation)
    skip = connections[rows.db].features.has_select_for_update_skip_locked
    with transaction.atomic(using=rows.db):
        free = rows.filter(pk__in=ids).order_by("pk").select_for_update(skip_locked=skip)
        if locked := [*free.values_list("pk", flat=True)]:
            rows.filter(pk__in=locked).update(**changes)
