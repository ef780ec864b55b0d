"""The Celery task that purges, for Celery beat to send.

Celery finds it where the project's Celery app calls ``autodiscover_tasks()``. It is scheduled in
the project's settings (or in ``app.conf.beat_schedule``)::

    CELERY_BEAT_SCHEDULE = {
        "purge-idempotency-keys": {
            "task": "idempotency_django.tasks.purge_expired_keys",
            "schedule": timedelta(hours=1),
            "options": {"expires": 3600},  # tasks that no worker took in time do not pile up
        },
    }
"""

from __future__ import annotations

from celery import shared_task

from .stores.purging import BATCH_SIZE, purge


@shared_task(name="idempotency_django.tasks.purge_expired_keys")
def purge_expired_keys(batch_size: int = BATCH_SIZE) -> int:
    """Purge every store and the tables of messaging; return how many rows were deleted.

    Several may run at the same time, and one that was killed may run again.

    Args:
        batch_size: the most records to delete in one transaction.
    """
    return sum(purge(batch_size=batch_size))
