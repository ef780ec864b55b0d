"""Celery's tasks as messages: what ``IdempotentTask.enqueue_once()`` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from ..databases import database
from .publishing import publish, refuse_autocommit

TOPIC: Final = "celery"


def enqueue(
    task: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dedup_id: str | None,
    window: timedelta | None,
) -> str:
    """Write the message of a task; see :class:`~idempotency_django.jobs.enqueueing.Enqueue`."""
    refuse_autocommit(database(), "enqueue_once")
    data = {"args": [*args], "kwargs": {**kwargs}}
    return publish(TOPIC, data, type=task, dedup_id=dedup_id, window=window)
