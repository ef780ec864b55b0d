"""The SQL of the database store: each statement is named, described, whole, and in use."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from idempotency_django.models import IdempotencyKey, IdempotencyKeyQuerySet
from idempotency_django.stores.database import DatabaseStore, dialects
from idempotency_django.stores.database.dialects.statements import statements, templates
from idempotency_django.stores.records import Record
from idempotency_django.testing import an_operation
from tests.support.factories import IdempotencyKeyFactory, ago, record
from tests.support.plans import rows_read

pytestmark = pytest.mark.driver

FOLDER = Path(dialects.__file__).parent
VENDORS = sorted(dialects.DIALECTS)
BASE = {"claim", "read", "complete", "fence", "save_step", "extend", "owned", "purge"}
ALIASES = list(settings.ALIASES.values())

each_vendor = pytest.mark.parametrize("vendor", VENDORS)


def text_of(vendor: str) -> str:
    return (FOLDER / "sql" / f"{vendor}.sql").read_text()


def test_files() -> None:
    """Each kind of database has a file, and each file is one's."""
    files = {path.stem for path in (FOLDER / "sql").iterdir()}
    assert files == set(VENDORS)


@each_vendor
def test_every_statement_is_found(vendor: str) -> None:
    """Each block of a file is a statement with a name and a description; nothing is left out."""
    text = text_of(vendor)
    _, *blocks = re.split(r"^-- (\w+) --$", text, flags=re.MULTILINE)
    found = templates(vendor)
    assert blocks[::2] == list(found)
    assert set(found) >= BASE
    for name, block in zip(blocks[::2], blocks[1::2], strict=True):
        description = re.match(r"\n((?:-- .*\n)+)", block)
        assert description, name
        assert description[1].rstrip().endswith((".", ":")), name
        assert block[description.end() :].strip() == found[name], name
        assert "--" not in found[name], name


@each_vendor
def test_every_statement_is_used(vendor: str) -> None:
    """Each is asked for by its name, by the module of the database or by one that all share."""
    modules = [vendor, "base", "../store", "../checks"]
    code = "".join((FOLDER / f"{module}.py").read_text() for module in modules)
    assert {name for name in templates(vendor) if f'"{name}"' not in code} == set()


@each_vendor
def test_names_are_quoted(vendor: str) -> None:
    """A statement has the names of the model's metadata, quoted, and no placeholder is left."""
    for name, sql in statements(vendor, lambda word: f"<{word}>").items():
        assert "{" not in sql, name
        if "key" not in name and name != "is_read_only":
            ours = f"<{IdempotencyKey._meta.db_table}" in sql
            assert ours or "steps" in name, name


def test_no_sql_in_the_dialects() -> None:
    """No statement is put together in the middle of a method."""
    statement = re.compile(r"[\"'](SELECT|INSERT|UPDATE|DELETE|WITH)\b")
    wrapping = {"pipelining.py"}  # it puts a statement of the files within another
    found = {
        path.name for path in FOLDER.glob("*.py") if statement.search(path.read_text())
    } - wrapping
    assert found == set()


STATES: list[dict[str, Any]] = [
    {},
    {"failed": True},
    {"tombstone": True},
    {"permanent": True},
    {"in_progress": True},
    {"interrupted": True},
    {"held": True},
    {"in_progress": True, "lease_expires_at": None},
    {"in_progress": True, "lease_expires_at": None, "created_at": ago(seconds=30)},
    {"in_progress": True, "lease_expires_at": None, "hold": True, "created_at": ago(days=9)},
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
        found = store.acquire(replace(operation, key=key))
        assert store.get(key, operation.scope)
    assert isinstance(found, Record)
    assert found.counted
    looked = [q["sql"] for q in queries if q["sql"].split()[0] in ("SELECT", "UPDATE")]
    assert len(looked) == 2
    assert [rows_read(using, statement) for statement in looked] == [1, 1]
