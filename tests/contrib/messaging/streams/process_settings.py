"""Settings of a process that owns streams, in the tests' own database: ``TEST_DATABASE``."""

from __future__ import annotations

import json
import os

from tests.support.mysql import use_pymysql

use_pymysql()

DATABASES = {"default": json.loads(os.environ["TEST_DATABASE"])}
SECRET_KEY = "tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["idempotency_django", "idempotency_django.contrib.messaging", "tests"]
