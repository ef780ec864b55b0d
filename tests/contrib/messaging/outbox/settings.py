"""Settings of processes that publish, relay and consume: the tests' own database."""

from __future__ import annotations

import os

from tests.contrib.messaging.consuming.settings import *  # noqa: F403

os.environ.setdefault("LEASE_SECONDS", "30")
INSTALLED_APPS = ["idempotency_django", "idempotency_django.contrib.messaging", "tests"]
IDEMPOTENCY = {
    "OUTBOX": {
        "orders": {
            "BACKEND": "tests.contrib.messaging.outbox.log.LogPublisher",
            "MAX_ATTEMPTS": 1_000_000,
        },
        "local": {
            "BACKEND": "tests.contrib.messaging.outbox.crashing.Wire",
            "OPTIONS": {"consumers": ["tests.contrib.messaging.outbox.crashing.booking"]},
        },
    },
}
