"""The settings of the bank under a nemesis: any store, any database, short leases.

``NEMESIS`` is JSON: ``database`` (its URL), ``store`` (its declaration), ``redis`` (its URL, where
there is one) and ``lease`` (in seconds).
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

import dj_database_url
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.mysql import use_pymysql

use_pymysql()

_given: dict[str, Any] = json.loads(os.environ["NEMESIS"])
_options: dict[str, dict[str, Any]] = {
    "sqlite": {
        "transaction_mode": "IMMEDIATE",
        "timeout": 1,
        "init_command": "PRAGMA synchronous = OFF",  # no machine crashes here
    },
    "postgres": {"connect_timeout": 5},
    "mysql": {"connect_timeout": 5},
}

LEDGER_URL = os.environ["LEDGER_URL"]
_database = dict(dj_database_url.parse(_given["database"], conn_max_age=600))
_options_of_url: dict[str, Any] = _database.get("OPTIONS", {})
_database["OPTIONS"] = _options_of_url | _options[_given["database"].partition(":")[0]]
DATABASES = {"default": _database}
if _given["redis"]:
    _patience = {
        "SOCKET_CONNECT_TIMEOUT": 1,
        "SOCKET_TIMEOUT": 2,
        "CONNECTION_POOL_KWARGS": {"retry": Retry(NoBackoff(), 1)},  # the clients retry
    }
    CACHES = {
        "default": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": _given["redis"],
            "OPTIONS": _patience,
        }
    }
SECRET_KEY = "tests"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.faults.nemesis_views"
INSTALLED_APPS = ["rest_framework", "idempotency_django", "tests.faults.bank"]
MIDDLEWARE = ["django.middleware.common.CommonMiddleware"]  # tells the length
REST_FRAMEWORK = {"UNAUTHENTICATED_USER": None, "DEFAULT_AUTHENTICATION_CLASSES": []}
IDEMPOTENCY = {
    "STORES": {"default": _given["store"]},
    "POLICY": {"required": True, "lease": timedelta(seconds=_given["lease"])},
}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"], "level": "ERROR"},
    "loggers": {"django.server": {"level": "CRITICAL", "handlers": [], "propagate": False}},
}
