"""Celery's tasks as messages: what ``IdempotentTask.enqueue_once()`` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from ..databases import database
from ..models import OutboxMessage
from ..models.outbox import OutboxState
from .publishing import ContentId, dedup_of, publish, refuse_autocommit

TOPIC: Final = "celery"


def enqueue(
    task: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dedup_id: str | None,
    window: timedelta | None,
    unfinished: Callable[[], bool],
) -> str:
    """Write the message of a task; see :class:`~idempotency_django.jobs.enqueueing.Enqueue`."""
    using = database()
    refuse_autocommit(using, "enqueue_once")
    data = {"args": [*args], "kwargs": {**kwargs}}
    if dedup_id is None:
        return publish(TOPIC, data, type=task)
    names = ContentId(dedup_id)
    sent = OutboxMessage.objects.using(using).filter(
        dedup=dedup_of(TOPIC, names), state=OutboxState.SENT
    )
    if sent.exists() and unfinished():
        sent.update(dedup=None)
    return publish(TOPIC, data, type=task, dedup_id=names, window=window)
