"""Celery: a broker at ``BROKER_URL`` and a worker, or each task at once in the caller's process."""

from __future__ import annotations

import os

from celery import Celery
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")

app = Celery("testproject")
app.conf.broker_connection_retry_on_startup = True
app.conf.task_always_eager = not settings.BROKER_URL
app.conf.task_eager_propagates = True
if settings.BROKER_URL:
    app.conf.broker_url = settings.BROKER_URL
if settings.BROKER_URL.startswith("redis"):
    app.conf.result_backend = settings.BROKER_URL
    # Celery's own way, which the demo compares ours with.
    app.conf.worker_deduplicate_successful_tasks = True
if settings.REDELIVERY_SECONDS:
    app.conf.broker_transport_options = {
        "visibility_timeout": settings.REDELIVERY_SECONDS,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
app.autodiscover_tasks()
