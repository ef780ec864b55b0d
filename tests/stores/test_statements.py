"""The SQL of the database store: what a purge takes, and how rows are found."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from idempotency_django.models import IdempotencyKey, IdempotencyKeyQuerySet
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import Record
from idempotency_django.testing import an_operation
from tests.support.factories import IdempotencyKeyFactory, ago, record
from tests.support.plans import rows_read

pytestmark = pytest.mark.driver

ALIASES = list(settings.ALIASES.values())


STATES: list[dict[str, Any]] = [
    {},
    {"failed": True},
    {"tombstone": True},
    {"permanent": True},
    {"in_progress": True},
    {"interrupted": True},
    {"held": True},
]


@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.parametrize("alias", ALIASES, ids=list(settings.ALIASES))
def test_purge_takes_what_is_purgeable(alias: str) -> None:
    """The SQL of the purge and the queryset of operators are of one mind, on every record."""
    for days in (None, -1, 1, 3):
        for state in STATES:
            ends = {} if days is None else {"purge_at": ago(days=days)}
            record(alias, **{**state, **ends})
    store, rows = DatabaseStore("default", using=alias), IdempotencyKeyQuerySet(IdempotencyKey)
    older_than = timedelta(days=2)
    for age in (older_than, timedelta(0)):
        every = set(rows.using(alias).values_list("pk", flat=True))
        gone = set(rows.using(alias).purgeable(age).values_list("pk", flat=True))
        assert 0 < len(gone) < len(every)
        assert store.purge(age, 1000) == len(gone)
        assert set(rows.using(alias).values_list("pk", flat=True)) == every - gone
    assert connections[alias].in_atomic_block is False


@pytest.mark.skipif("postgres" not in settings.ALIASES, reason="the plans are PostgreSQL's")
@pytest.mark.django_db(transaction=True, databases="__all__")
def test_busy_scope_that_is_new() -> None:
    """A record is found by its key, however many others are in a scope that no statistics know."""
    using, operation = settings.ALIASES["postgres"], an_operation()
    store, rows = (
        DatabaseStore("default", using=using),
        IdempotencyKey.objects.using(using),
    )
    rows.bulk_create(IdempotencyKeyFactory.build_batch(200, scope="known"))
    with connections[using].cursor() as cursor:
        cursor.execute(f"ANALYZE {IdempotencyKey._meta.db_table}")
    rows.bulk_create(IdempotencyKeyFactory.build_batch(200, scope=operation.scope))
    rows.filter(scope=operation.scope).update(fingerprint=operation.fingerprint)
    key = rows.filter(scope=operation.scope).values_list("key", flat=True)[100]
    with transaction.atomic(using=using), CaptureQueriesContext(connections[using]) as queries:
        assert isinstance(store.acquire(replace(operation, key=key)), Record)
        assert store.get(key, operation.scope)
    *_, looked = [query["sql"] for query in queries]
    assert looked.startswith("SELECT")
    assert rows_read(using, looked) == 1
