"""A project as ``startproject`` makes it, whose connections persist."""

from __future__ import annotations

import os

import dj_database_url

SECRET_KEY = "benchmarks"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = "benchmarks.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": dj_database_url.parse(os.environ["BENCH_DATABASE_URL"], conn_max_age=None)}
CACHES = {
    "default": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": os.environ["BENCH_REDIS_URL"],
    }
}
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "rest_framework",
    "django_outbox_pattern",
    "django_domain_events",
    "djstripe",
    "idempotency_django",
    "idempotency_django.contrib.messaging",
    "benchmarks",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

IDEMPOTENCY = {
    "STORES": {
        "default": {"BACKEND": "idempotency_django.stores.database.DatabaseStore"},
        "memory": {"BACKEND": "idempotency_django.stores.memory.MemoryStore"},
        "redis": {"BACKEND": "idempotency_django.contrib.redis.RedisStore"},
        "cached": {"BACKEND": "idempotency_django.contrib.cached.CachedStore"},
    },
    "OUTBOX": {"benchmark": {"BACKEND": "benchmarks.outbox.Nowhere"}},
}
STRIPE_TEST_SECRET_KEY = f"sk_test_{'benchmarks' * 3}"
DJSTRIPE_FOREIGN_KEY_TO_FIELD = "id"
# Its relay would sleep for a second after each look at its table.
DJANGO_OUTBOX_PATTERN = {"DEFAULT_PRODUCER_WAITING_TIME": 0}

# django-idempotency-key, as its README sets it up for several processes; without its
# CONFLICT_STATUS_CODE it would refuse a retry with 409.
IDEMPOTENCY_KEY = {
    "STORAGE": {"CLASS": "idempotency_key.storage.CacheKeyStorage", "CACHE_NAME": "default"},
    "LOCK": {
        "CLASS": "idempotency_key.locks.redis.MultiProcessRedisLock",
        "LOCATION": os.environ["BENCH_REDIS_URL"],
    },
    "CONFLICT_STATUS_CODE": None,
}
