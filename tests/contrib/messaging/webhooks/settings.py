"""Settings of processes that receive and process: the database is ``TEST_DATABASE``'s."""

from __future__ import annotations

import json
import os
from datetime import timedelta

from tests.support.mysql import use_pymysql

use_pymysql()

DATABASES = {"default": json.loads(os.environ["TEST_DATABASE"])}
SECRET_KEY = "tests"
USE_TZ = True
ALLOWED_HOSTS = ["*"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.contrib.messaging.webhooks.striking"
INSTALLED_APPS = ["idempotency_django", "idempotency_django.contrib.messaging", "tests"]
IDEMPOTENCY = {"POLICY": {"lease": timedelta(seconds=1)}}
LOGGING = {"version": 1, "disable_existing_loggers": False, "root": {"level": "CRITICAL"}}
