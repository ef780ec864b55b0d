"""Settings, from environment variables.

``DATABASE_URL``, ``REDIS_URL``
    Where the database is, and Redis, if it is needed; or what stands before them.
``LEDGER_URL``
    Where the ledger is, which is somebody else's.
``STORE``
    The class of the store, which is the one for databases by default.
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
from typing import Any

import dj_database_url
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.mysql import use_pymysql

use_pymysql()

LEDGER_URL = os.environ.get("LEDGER_URL", "")

_url = os.environ["DATABASE_URL"]
_database: dict[str, Any] = {
    **dj_database_url.parse(_url, conn_max_age=int(os.environ.get("CONN_MAX_AGE", "0"))),
    "ATOMIC_REQUESTS": os.environ.get("ATOMIC_REQUESTS") == "1",
    "DISABLE_SERVER_SIDE_CURSORS": True,  # as behind a pooler
}
_options: dict[str, Any] = {"connect_timeout": 5}
if _url.startswith("sqlite"):
    # Nothing here crashes the machine.
    synchronous = "PRAGMA synchronous = OFF"
    _options = {"transaction_mode": "IMMEDIATE", "timeout": 20, "init_command": synchronous}
DATABASES = {"default": {**_database, "OPTIONS": {**_database.get("OPTIONS", {}), **_options}}}
if _redis := os.environ.get("REDIS_URL"):
    _patience = {
        "SOCKET_CONNECT_TIMEOUT": 1,
        "SOCKET_TIMEOUT": 2,
        "CONNECTION_POOL_KWARGS": {"retry": Retry(NoBackoff(), 1)},  # the clients retry
    }
    _backend = "django_redis.cache.RedisCache"
    CACHES = {"default": {"BACKEND": _backend, "LOCATION": _redis, "OPTIONS": _patience}}
SECRET_KEY = "tests"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.faults.bank.views"
INSTALLED_APPS = ["rest_framework", "idempotency_django", "tests.faults.bank"]
MIDDLEWARE = ["django.middleware.common.CommonMiddleware"]  # tells the length
REST_FRAMEWORK = {"UNAUTHENTICATED_USER": None, "DEFAULT_AUTHENTICATION_CLASSES": []}
IDEMPOTENCY = {
    "POLICY": {
        "required": True,
        "lease": timedelta(seconds=float(os.environ.get("LEASE_SECONDS", "1"))),
    },
    "STORES": {
        "default": {
            "BACKEND": os.environ.get("STORE", "idempotency_django.stores.database.DatabaseStore"),
            "OPTIONS": {"combine_statements": False} if os.environ.get("ONE_BY_ONE") == "1" else {},
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
