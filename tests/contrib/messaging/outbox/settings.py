"""Settings of processes that publish, relay and consume: the tests' own database."""

from __future__ import annotations

from tests.support.outside_settings import *  # noqa: F403  # these are its settings

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
