"""The settings of the tests: every database that is there, the first one as the default."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

if os.environ.get("TEST_PSYCOPG") == "2":
    sys.modules["psycopg"] = None  # type: ignore[assignment]  # Django then falls back to psycopg2

import dj_database_url

from tests.support.mysql import use_pymysql

sys.path.append(str(Path(__file__).parents[1] / "docs" / "project"))  # the app `shop`

use_pymysql()

_scratch = Path(os.environ.get("TEST_SCRATCH", tempfile.gettempdir())) / "tests.sqlite3"


def _database(name: str) -> dict[str, object]:
    if name == "sqlite":
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(_scratch),
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "timeout": 20,
                "init_command": "PRAGMA synchronous=OFF",  # as PostgreSQL: only the machine crashes
            },
            "TEST": {"NAME": str(_scratch)},
        }
    parsed = dict(dj_database_url.parse(os.environ[f"TEST_{name.upper()}_URL"]))
    parsed["TEST"] = {"NAME": f"test_idempotency_{os.getpid()}"}
    return parsed


_names = os.environ.get("TEST_DATABASES", "sqlite").split(",")
DATABASES = {
    ("default" if place == 0 else name): _database(name) for place, name in enumerate(_names)
}
ALIASES = {name: ("default" if place == 0 else name) for place, name in enumerate(_names)}

SECRET_KEY = "tests"
USE_TZ = os.environ.get("TEST_USE_TZ") != "0"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.urls"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "rest_framework",
    "rest_framework.authtoken",
    "drf_spectacular",
    "idempotency_django",
    "idempotency_django.contrib.messaging",
    "shop",
    "tests",
]
REST_FRAMEWORK = {"DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema"}
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
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
SESSION_ENGINE = "tests.support.sessions"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
STATIC_URL = "/static/"
