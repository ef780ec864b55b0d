"""Settings of a process of ``run_consumer``."""

from __future__ import annotations

from tests.support.outside_settings import *  # noqa: F403  # these are its settings

IDEMPOTENCY = {"CONSUMERS": ["tests.contrib.messaging.transports.consumers.billing"]}
