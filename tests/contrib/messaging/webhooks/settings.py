"""Settings of processes that receive and process: the database is ``TEST_DATABASE``'s."""

from __future__ import annotations

from datetime import timedelta

from tests.support.outside_settings import *  # noqa: F403  # these are its settings

ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "tests.contrib.messaging.webhooks.striking"
IDEMPOTENCY = {"POLICY": {"lease": timedelta(seconds=1)}}
LOGGING = {"version": 1, "disable_existing_loggers": False, "root": {"level": "CRITICAL"}}
