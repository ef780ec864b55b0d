"""Settings, from environment variables.

``DATABASE_URL``
    Where the database is, or what stands before it.
``LEDGER_URL``
    Where the ledger is, which is somebody else's.
``ATOMIC_REQUESTS``
    ``1`` wraps each request in a transaction.
``CONN_MAX_AGE``
    For how many seconds a connection is kept.
``ONE_BY_ONE``
    ``1`` sends each statement in a message of its own.
``LEASE_SECONDS``
    For how long a claim outlives its owner.
"""

from __future__ import annotations

import os
from datetime import timedelta

import dj_database_url

from tests.support.mysql import use_pymysql

use_pymysql()

LEDGER_URL = os.environ.get("LEDGER_URL", "")
LEASE = timedelta(seconds=float(os.environ.get("LEASE_SECONDS", "1")))

DATABASES = {
    "default": {
        **dj_database_url.parse(
            os.environ["DATABASE_URL"],
            conn_max_age=int(os.environ.get("CONN_MAX_AGE", "0")),
        ),
        "ATOMIC_REQUESTS": os.environ.get("ATOMIC_REQUESTS") == "1",
        "DISABLE_SERVER_SIDE_CURSORS": True,  # as behind a pooler
    }
}
if "sqlite" in DATABASES["default"]["ENGINE"]:
    DATABASES["default"]["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}
SECRET_KEY = "tests"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.faults.bank.views"
INSTALLED_APPS = ["rest_framework", "idempotency_django", "tests.faults.bank"]
MIDDLEWARE = ["django.middleware.common.CommonMiddleware"]  # tells the length
REST_FRAMEWORK = {"UNAUTHENTICATED_USER": None, "DEFAULT_AUTHENTICATION_CLASSES": []}
IDEMPOTENCY = {
    "POLICY": {"required": True, "lease": LEASE},
    "STORES": {
        "default": {
            "BACKEND": "idempotency_django.stores.database.DatabaseStore",
            "OPTIONS": {"combine_statements": os.environ.get("ONE_BY_ONE") != "1"},
        }
    },
}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"], "level": "WARNING"},
    "loggers": {
        "django.request": {"level": "ERROR"},  # a refused request is an everyday thing here
        "django.server": {"level": "ERROR", "handlers": [], "propagate": True},
    },
}
