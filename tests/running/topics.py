"""A topic whose messages are purged as soon as they were sent."""

from __future__ import annotations

from datetime import timedelta

IDEMPOTENCY = {
    "CONSUMERS": ["tests.running.consumers.billing"],
    "OUTBOX": {
        "orders": {
            "BACKEND": "local",
            "OPTIONS": {"consumers": ["tests.running.consumers.billing"]},
            "RETENTION": timedelta(0),
        }
    },
}
