"""A database in which ``migrate`` was forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from idempotency_django.models import IdempotencyKey, IdempotencyStep
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.testing import an_operation
from tests.support.shared import effects, new_key, post
from tests.support.views import create

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.urls(__name__),
    pytest.mark.driver,
]

KEYS = IdempotencyKey._meta.db_table
STEPS = IdempotencyStep._meta.db_table


urlpatterns = [path("view/", idempotent(create))]


@pytest.fixture(params=list(settings.DATABASES))
def alias(request: pytest.FixtureRequest) -> str:
    """Each database."""
    return str(request.param)


@pytest.fixture(params=["table", "column", "steps"])
def missing(request: pytest.FixtureRequest, alias: str) -> Iterator[str]:
    """What a migration would have made is not there."""
    there, away = {
        "table": (f"ALTER TABLE {KEYS}", (f"RENAME TO {KEYS}_away", KEYS)),
        "column": (f"ALTER TABLE {KEYS}", ("RENAME COLUMN hold TO hold_away", "hold")),
        "steps": (f"ALTER TABLE {STEPS}", (f"RENAME TO {STEPS}_away", STEPS)),
    }[request.param]
    change, name = away
    back = {
        "table": f"ALTER TABLE {KEYS}_away RENAME TO {KEYS}",
        "column": f"ALTER TABLE {KEYS} RENAME COLUMN hold_away TO hold",
        "steps": f"ALTER TABLE {STEPS}_away RENAME TO {STEPS}",
    }[request.param]
    with connections[alias].cursor() as cursor:
        cursor.execute(f"{there} {change}")
    yield name
    with connections[alias].cursor() as cursor:
        cursor.execute(back)


def configure(settings: Any, alias: str) -> None:
    backend = "idempotency_django.stores.database.DatabaseStore"
    store = {"BACKEND": backend, "OPTIONS": {"using": alias}}
    settings.IDEMPOTENCY = {"STORES": {"default": store}}


def test_claim(alias: str, missing: str) -> None:
    """A claim, and what follows it, says what to do, and not that the database is away."""
    store = DatabaseStore("default", using=alias)
    operation = an_operation(lease=timedelta(seconds=30))
    with pytest.raises(ImproperlyConfigured, match=r"manage.py migrate"):
        store.steps(store.acquire(operation))  # type: ignore[arg-type]  # a claim, or an error


def test_request(client: Client, alias: str, missing: str, settings: Any) -> None:
    """A request is an error of the server, and nothing is executed."""
    configure(settings, alias)
    if missing == STEPS:
        pytest.skip("STEPS ARE ONLY READ IN LEASED MODE")
    with pytest.raises(ImproperlyConfigured, match=r"manage.py migrate"):
        post(client, "/view/", new_key())
    assert effects() == 0
