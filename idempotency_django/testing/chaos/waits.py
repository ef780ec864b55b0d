"""Lets the time pass that the package's tables wait for, and counts what is stuck in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from django.apps import apps
from django.db.models import QuerySet

from ...messaging.databases import database
from ...models import DatabaseNow, IdempotencyKey, IdempotencyKeyQuerySet
from ...records import Status
from ...stores import stores

MESSAGING: Final = "idempotency_messaging"

_PAST: Final = timedelta(seconds=1)
_STUCK: Final = {
    "InboxMessage": ("pending", "held", "parked"),
    "OutboxMessage": ("pending", "blocked", "skipped"),
}


def end_waits() -> int:
    """End all leases, and make all messages due; how many rows that changed.

    Time is not passed by waiting: what ends in the future by the database's clock has ended.
    """
    past = DatabaseNow() - _PAST
    ended = [
        records.filter(status=Status.IN_PROGRESS)
        .exclude(lease_expires_at__lte=DatabaseNow())
        .update(lease_expires_at=past)
        for records in _records()
    ]
    if apps.is_installed("idempotency_django.messaging"):
        leased = _messaging("OutboxStream").filter(lease_expires_at__gt=DatabaseNow())
        ended.append(leased.update(lease_expires_at=past))
        for name in ("OutboxStream", *_STUCK):
            waiting = _messaging(name).filter(process_after__gt=DatabaseNow())
            ended.append(waiting.update(process_after=past))
    return sum(ended)


def stuck() -> Counter[str]:
    """What the package's tables say is neither done nor given up, by its state."""
    found: Counter[str] = Counter()
    for records in _records():
        in_progress = records.filter(status=Status.IN_PROGRESS)
        found["held"] += in_progress.filter(hold=True).count()
        found["in progress"] += in_progress.filter(hold=False).count()
    if apps.is_installed("idempotency_django.messaging"):
        for name, states in _STUCK.items():
            rows = _messaging(name)
            for state in states:
                found[f"{state} in the {name[:-7].lower()}"] += rows.filter(state=state).count()
    return +found


def _records() -> Iterator[IdempotencyKeyQuerySet]:
    databases = {store.using: None for store in stores.all() if store.using is not None}
    for using in databases:
        yield IdempotencyKeyQuerySet(IdempotencyKey, using=using)


def _messaging(name: str) -> QuerySet[Any]:
    return QuerySet(apps.get_model(MESSAGING, name), using=database())
