"""The Celery app of the recipe: the queue is a quorum queue, which counts deliveries."""

from __future__ import annotations

import os

from kombu import Queue

broker_url = os.environ["BROKER_URL"]
task_default_queue = os.environ["QUEUE"]
task_queues = [Queue(task_default_queue, queue_arguments={"x-queue-type": "quorum"})]
worker_prefetch_multiplier = 1
worker_hijack_root_logger = False
