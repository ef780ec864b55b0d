"""The settings of ``run_messaging``, in a process that a test starts."""

from __future__ import annotations

from tests.contrib.messaging.running import topics
from tests.support.outside_settings import *  # noqa: F403  # these are its settings

IDEMPOTENCY = topics.IDEMPOTENCY
