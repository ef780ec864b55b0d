"""Completed records as entries of a cache."""

from __future__ import annotations

import json
import logging
from typing import Any

from ..records import Operation, Record, Status
from .codec import decode, encode

logger = logging.getLogger("idempotency_django")


def encode_record(record: Record, timeline: str) -> bytes:
    """The entry of a completed record that was stored on a timeline of the database."""
    assert record.payload is not None  # noqa: S101  # a completed record has one
    answer = encode(record.payload)
    head = [record.key, record.scope, record.attempt, record.fingerprint]
    head += [answer.status, answer.headers, answer.body is not None, record.record_id, timeline]
    return json.dumps(head).encode() + b"\n" + (answer.body or b"")


def decode_record(cached: Any, operation: Operation, timeline: str) -> Record | None:
    """The record of the operation that was cached on the timeline; ``None``: it is not one."""
    try:
        head, _, body = cached.partition(b"\n")
        key, scope, attempt, fingerprint, status, headers, has_body, record_id, cached_on = (
            json.loads(head)
        )
        payload = decode(status, headers, body if has_body else None)
    except (AttributeError, TypeError, ValueError):
        logger.warning(
            "The cache entry for %s is not a stored answer. The database answers instead.",
            operation.key,
        )
        return None
    if (key, scope, cached_on) != (operation.key, operation.scope, timeline):
        return None
    return Record(
        key=key,
        scope=scope,
        status=Status.COMPLETED,
        attempt=attempt,
        fingerprint=fingerprint,
        payload=payload,
        counted=True,
        record_id=record_id,
    )
