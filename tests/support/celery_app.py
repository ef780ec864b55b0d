"""A project's Celery app, with the beat entry that the package documents, sent every second."""

from __future__ import annotations

import os

from celery import Celery

app = Celery("tests", broker=os.environ["TEST_BROKER"])
app.conf.broker_connection_retry_on_startup = True
app.conf.beat_schedule = {
    "purge-idempotency-keys": {
        "task": "idempotency_django.tasks.purge_expired_keys",
        "schedule": 1.0,
        "kwargs": {"batch_size": 10},
    },
}
app.autodiscover_tasks()
