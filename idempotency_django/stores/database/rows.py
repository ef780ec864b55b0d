"""Rows of the database store as the values that stores speak in."""

from __future__ import annotations

from typing import Any

from ...models import DatabaseNow
from ...records import Operation, Record, Status
from ..codec import decode


def in_progress(operation: Operation) -> Record:
    """The record that stands for a row that cannot be seen, or cannot be locked, now."""
    return Record(key=operation.key, scope=operation.scope, status=Status.IN_PROGRESS)


def lifetime(operation: Operation) -> dict[str, Any]:
    """The columns that say how long a row lives that is written or used now."""
    if operation.ttl is None:
        return {"expires_at": None, "purge_at": None}
    return {
        "expires_at": DatabaseNow() + operation.ttl,
        "purge_at": DatabaseNow() + (operation.ttl + operation.retention),
    }


def record_of(key: str, scope: str, row: tuple[Any, ...], *, counted: bool = False) -> Record:
    """The record in a row of the columns that a dialect selects."""
    record_id, status, attempt, fingerprint, code, headers, body, expired, lapsed, hold, left = row
    interrupted = status == Status.IN_PROGRESS and bool(lapsed)
    completed = status == Status.COMPLETED
    return Record(
        key=key,
        scope=scope,
        status=Status(status),
        attempt=attempt,
        fingerprint=fingerprint,
        payload=decode(code, headers, body) if completed else None,
        expired=bool(expired) and status != Status.IN_PROGRESS,
        interrupted=interrupted,
        held=interrupted and bool(hold),
        lease_left=None if left is None else max(0.0, left),
        counted=counted,
        record_id=record_id,
    )
