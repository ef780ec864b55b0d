"""The settings of a worker process: where it writes, what it reads from, and how long things live.

``TEST_WORKER`` is JSON: ``store`` (``database`` or ``redis``), ``lease`` and ``ttl`` in seconds,
``cache`` (the URL of Redis) and ``replica`` (a database to read from).
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

from idempotency_django.policy.scopes import shared
from tests.support.outside_settings import *  # noqa: F403  # these are its settings
from tests.support.outside_settings import DATABASES

_given: dict[str, Any] = json.loads(os.environ["TEST_WORKER"])

if replica := _given.get("replica"):
    DATABASES["replica"] = replica
    DATABASE_ROUTERS = ["tests.faults.replicas.ReadsFromReplica"]

if cache := _given.get("cache"):
    CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": cache}}

_stores = {
    "database": {"BACKEND": "idempotency_django.stores.database.DatabaseStore"},
    "redis": {"BACKEND": "idempotency_django.contrib.redis.RedisStore"},
}
IDEMPOTENCY = {
    "STORES": {"default": _stores[_given.get("store", "database")]},
    "POLICY": {
        "lease": timedelta(seconds=_given.get("lease", 1)),
        "ttl": timedelta(seconds=_given.get("ttl", 3600)),
        "scope": shared,
    },
}
ROOT_URLCONF = "tests.faults.late_views"
ALLOWED_HOSTS = ["*"]
SESSION_ENGINE = "django.contrib.sessions.backends.signed_cookies"
