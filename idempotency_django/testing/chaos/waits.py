"""Lets the time pass that the package's tables wait for, and counts what is stuck in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from django.apps import apps
from django.db.models import Count, QuerySet

from ...messaging.databases import database
from ...models import DatabaseNow, IdempotencyKey, IdempotencyKeyQuerySet
from ...records import Status
from ...stores import stores

_PAST: Final = timedelta(seconds=1)
_UNTIL: Final = "process_after"
"""The column of the tables of messaging that says until when something waits."""
_DONE: Final = ("handled", "ignored", "sent")


def end_waits() -> int:
    """End all leases, and make all messages due; how many rows that changed.

    Time is not passed by waiting: what ends in the future by the database's clock has ended.
    """
    past = DatabaseNow() - _PAST
    changed = [
        records.filter(status=Status.IN_PROGRESS)
        .exclude(lease_expires_at__lte=DatabaseNow())
        .update(lease_expires_at=past)
        for records in _records()
    ]
    for rows in _messaging():
        if _UNTIL in _columns(rows):
            waiting = rows.filter(process_after__gt=DatabaseNow())
            changed.append(waiting.update(process_after=past))
    return sum(changed)


def stuck() -> Counter[str]:
    """What the package's tables say is neither done nor given up, by its state."""
    found: Counter[str] = Counter()
    for records in _records():
        in_progress = records.filter(status=Status.IN_PROGRESS)
        found["record held"] += in_progress.filter(hold=True).count()
        found["record in progress"] += in_progress.filter(hold=False).count()
    for rows in _messaging():
        if "state" in _columns(rows):
            left = rows.exclude(state__in=_DONE).values_list("state").annotate(Count("pk"))
            name = rows.model._meta.verbose_name
            found.update({f"{name} {state}": count for state, count in left.order_by("state")})
    return +found


def _records() -> Iterator[IdempotencyKeyQuerySet]:
    for using in {store.using for store in stores.all()} - {None}:
        yield IdempotencyKeyQuerySet(IdempotencyKey, using=using)


def _messaging() -> Iterator[QuerySet[Any]]:
    """The tables of messaging, where its app is installed."""
    if apps.is_installed("idempotency_django.messaging"):
        for model in apps.get_app_config("idempotency_messaging").get_models():
            yield QuerySet(model, using=database())


def _columns(rows: QuerySet[Any]) -> set[str]:
    return {field.name for field in rows.model._meta.fields}
