"""The settings of a worker: the bank's tables, on whichever database ``JOBS`` names.

``JOBS`` is JSON: ``database``, ``broker`` and ``results_url``, ``lease`` (in seconds),
``visibility`` (in seconds; only Redis has it), and ``deduplicate`` (Celery's own way).
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

import dj_database_url

from tests.support.mysql import use_pymysql

use_pymysql()

JOBS: dict[str, Any] = json.loads(os.environ["JOBS"])
# A connection for each task, so that each passes the same boundaries.
DATABASES = {"default": dj_database_url.parse(JOBS["database"], conn_max_age=0)}
SECRET_KEY = "tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["idempotency_django", "tests.faults.bank"]
IDEMPOTENCY = {"POLICY": {"lease": timedelta(seconds=JOBS["lease"])}}
