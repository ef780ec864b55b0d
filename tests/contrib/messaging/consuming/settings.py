"""Settings of a process that consumes: the tests' database that ``TEST_DATABASE`` describes."""

from __future__ import annotations

import json
import os
from datetime import timedelta

from tests.support.mysql import use_pymysql

use_pymysql()

DATABASES = {"default": json.loads(os.environ["TEST_DATABASE"])}
SECRET_KEY = "tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["idempotency_django", "tests"]
IDEMPOTENCY = {
    "POLICY": {"lease": timedelta(seconds=float(os.environ["LEASE_SECONDS"]))},
    "STORES": {"default": {"BACKEND": "idempotency_django.stores.database.DatabaseStore"}},
}
