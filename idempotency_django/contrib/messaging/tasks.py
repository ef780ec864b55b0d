"""The Celery tasks of messaging, which Celery finds where ``autodiscover_tasks()`` is called.

Celery beat sends them, so that nothing waits for long::

    CELERY_BEAT_SCHEDULE = {
        "process-inbox": {
            "task": "idempotency_django.contrib.messaging.tasks.process_inbox",
            "schedule": timedelta(seconds=10),
            "options": {"expires": 10},  # tasks that no worker took in time do not pile up
        },
        "relay-outbox": {
            "task": "idempotency_django.contrib.messaging.tasks.relay_outbox",
            "schedule": timedelta(seconds=10),
            "options": {"expires": 10},
        },
    }
"""

from __future__ import annotations

from contextlib import closing

from celery import shared_task

from .inbox import BATCH, process_due
from .outbox.relay import Relay


@shared_task(name="idempotency_django.contrib.messaging.tasks.process_inbox", ignore_result=True)
def process_inbox(batch: int = BATCH) -> dict[str, int]:
    """Handle the messages of the webhook inbox that are due, and return how many there were.

    Several may run at the same time, and one that was killed may run again.

    Args:
        batch: how many messages are claimed in one transaction.
    """
    return dict(process_due(batch=batch))


@shared_task(name="idempotency_django.contrib.messaging.tasks.relay_outbox", ignore_result=True)
def relay_outbox() -> int:
    """Send the messages of the outbox that are due, and return how many were tried.

    Several may run at the same time, and one that was killed may run again. ``manage.py
    run_messaging`` keeps its connections to brokers and sends sooner.
    """
    with closing(Relay()) as relay:
        return relay.drain()
