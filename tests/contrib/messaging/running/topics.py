"""A topic whose messages are purged as soon as they were sent."""

from __future__ import annotations

from datetime import timedelta

IDEMPOTENCY = {
    "CONSUMERS": ["tests.contrib.messaging.running.consumers.billing"],
    "OUTBOX": {
        "orders": {
            "BACKEND": "local",
            "OPTIONS": {"consumers": ["tests.contrib.messaging.running.consumers.billing"]},
            "RETENTION": timedelta(0),
        }
    },
}
