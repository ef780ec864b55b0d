"""Settings, from environment variables. Made for trying things out, not for the internet.

``DATABASE_URL``
    The database; an SQLite file in this folder by default.
``REDIS_URL``
    A Redis or Valkey server to keep idempotency records in, instead of the database.
``CACHED``
    ``1`` keeps the records in the database nevertheless, and replays from Redis.
``LEASE_SECONDS``
    How long a claim that no transaction holds outlives its process; 30 by default.
``LEDGER_URL``
    The ledger that transfers are booked in; see ``ledger.py``.
``BROKER_URL``
    The broker of Celery's tasks: Redis, Valkey or RabbitMQ. By default a task runs at once, in the
    process that serves the request.
``REDELIVERY_SECONDS``
    After how long Redis delivers a task again that no worker has acknowledged.
``WEBHOOK_SECRET``, ``STRIPE_WEBHOOK_SECRET``
    What the senders of webhooks sign with.
``SIMULATE``
    ``1`` lets the header ``X-Simulate`` inject faults, down to killing the process that serves.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import dj_database_url

FOLDER = Path(__file__).parent

DATABASES = {
    "default": dj_database_url.config(
        default=f"sqlite:///{FOLDER / 'db.sqlite3'}",
        # Under ASGI each request has a thread of its own, which takes its connection with it.
        conn_max_age=0 if os.environ.get("ASGI") == "1" else 600,
    )
}
if DATABASES["default"]["ENGINE"].endswith("sqlite3"):
    DATABASES["default"]["OPTIONS"] = {
        # The write lock is taken when a transaction begins, so none can fail half-way for want
        # of it; the next one waits up to 20 seconds for its turn.
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        # Readers do not wait for the writer, and a commit outlives the process that made it.
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
    }
elif DATABASES["default"]["ENGINE"].endswith("mysql"):
    import pymysql

    pymysql.install_as_MySQLdb()

IN_DATABASE = {"BACKEND": "idempotency_django.stores.database.DatabaseStore"}
IDEMPOTENCY: dict[str, Any] = {
    "STORES": {
        "default": IN_DATABASE,
        # For operations with steps, which are kept with the effects: in the database always.
        "database": IN_DATABASE,
    },
    "POLICY": {"lease": timedelta(seconds=float(os.environ.get("LEASE_SECONDS") or 30))},
    "DIALECT": os.environ.get("DIALECT") or "ietf",
    # No broker: the process that sends a message hands it to its consumer. See background.py.
    "OUTBOX": {
        "payments": {
            "BACKEND": "local",
            "OPTIONS": {"consumers": ["testproject.payments.published.bookkeeping"]},
        },
    },
}
if REDIS_URL := os.environ.get("REDIS_URL"):
    CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": REDIS_URL}}
    IDEMPOTENCY["STORES"]["default"] = {
        "BACKEND": "idempotency_django.contrib.cached.CachedStore"
        if os.environ.get("CACHED") == "1"
        else "idempotency_django.contrib.redis.RedisStore",
        "OPTIONS": {"cache": "default"},
    }

LEDGER_URL = os.environ.get("LEDGER_URL") or "http://127.0.0.1:8001"
BROKER_URL = os.environ.get("BROKER_URL") or ""
REDELIVERY_SECONDS = float(os.environ.get("REDELIVERY_SECONDS") or 0)
WEBHOOK_SECRET = os.environ.get("WEBHOOK_SECRET") or "whsec_a25vd24gdG8gZXZlcnlib2R5LCB0b28="
STRIPE_WEBHOOK_SECRET = os.environ.get("STRIPE_WEBHOOK_SECRET") or "whsec_known_to_everybody_too"
SIMULATE = os.environ.get("SIMULATE") == "1"

SECRET_KEY = "known to everybody: this project is for trying things out"
# So are its passwords: a slow hash would protect nothing, and take a second for a new database.
PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.MD5PasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",  # of a database that is older than that
]
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "testproject.urls"
STATIC_URL = "/static/"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "rest_framework",
    "rest_framework.authtoken",
    "idempotency_django",
    "idempotency_django.contrib.messaging",
    "testproject.payments",
    "testproject.invoices",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.middleware.http.ConditionalGetMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    # Last, so that the others have let a request through before it is replayed.
    "idempotency_django.middleware.IdempotencyMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "rest_framework.authentication.TokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"], "level": "WARNING"},
    # A refused request is an everyday thing here; a failed one is not.
    "loggers": {"django.request": {"level": "ERROR"}},
}
