"""The settings of ``run_messaging``, in a process that a test starts."""

from __future__ import annotations

from tests.outside_settings import *  # noqa: F403  # these are its settings
from tests.running import topics

IDEMPOTENCY = topics.IDEMPOTENCY
