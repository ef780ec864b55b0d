"""The migrations, on every database that is there."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connections

from idempotency_django.models import IdempotencyKey, IdempotencyStep
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.testing import an_operation

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.parametrize("alias", settings.DATABASES),
    pytest.mark.driver,
]

TABLE = IdempotencyKey._meta.db_table
NOW = datetime(2030, 1, 1, tzinfo=UTC)


def migrate(alias: str, target: str = "") -> str:
    """Migrate the app, and return all that was said."""
    said = StringIO()
    names = ["idempotency_django", target] if target else ["idempotency_django"]
    call_command("migrate", *names, database=alias, stdout=said, stderr=said, no_color=True)
    return said.getvalue()


@pytest.fixture
def migrated_again(alias: str) -> Iterator[None]:
    """Migrates forwards after the test, however it ends."""
    yield
    migrate(alias)


def tables(alias: str) -> list[str]:
    """The tables of the database."""
    return connections[alias].introspection.table_names()


def indexes(alias: str) -> dict[str, dict[str, object]]:
    """The indexes and constraints of the table, by name."""
    with connections[alias].cursor() as cursor:
        return connections[alias].introspection.get_constraints(cursor, TABLE)  # type: ignore[no-any-return]


def create(alias: str, **changes: object) -> IdempotencyKey:
    """Insert a record."""
    given = {"key": "k", "scope": "s", "status": "completed", "created_at": NOW} | changes
    return IdempotencyKey.objects.using(alias).create(**given)


@pytest.mark.usefixtures("migrated_again")
def test_backwards_and_forwards(alias: str) -> None:
    """The app can be taken out of a project and put in again, with all its indexes."""
    before = set(indexes(alias))
    migrate(alias, "zero")
    assert TABLE not in tables(alias)
    migrate(alias)
    assert TABLE in tables(alias)
    assert set(indexes(alias)) == before
    assert create(alias).pk


@pytest.mark.usefixtures("migrated_again")
def test_migrate_says_nothing_unexpected(alias: str) -> None:
    """No database is warned of something that it does not have (a partial index on MariaDB)."""
    migrate(alias, "zero")
    said = migrate(alias)
    assert "0001_initial... OK" in said
    assert "WARN" not in said.upper()
    assert "idempotency_django.IdempotencyKey" not in said


def test_indexes(alias: str) -> None:
    """Each index is there under its name, and on the columns that the queries ask by."""
    found = {name: index["columns"] for name, index in indexes(alias).items()}
    assert found["idempotency_key_scope_uniq"] == ["key", "scope"]
    assert found["idempotency_purge_at_idx"] == ["purge_at"]
    assert not any(
        index in found for index in ("idempotency_created_at_idx", "idempotency_scope_idx")
    )
    assert found["idempotency_leases_idx"] == ["lease_expires_at"]
    assert found["idempotency_caused_by_idx"] == ["caused_by"]


@pytest.mark.parametrize(
    ("index", "condition"),
    [("idempotency_leases_idx", "IS NOT NULL"), ("idempotency_caused_by_idx", "caused_by")],
)
def test_partial_indexes(alias: str, index: str, condition: str) -> None:
    """Where a database has partial indexes, those of leases and causes hold what has one."""
    connection = connections[alias]
    if not connection.features.supports_partial_indexes:
        pytest.skip(f"{connection.display_name} has no partial indexes")
    question = {
        "postgresql": "SELECT indexdef FROM pg_indexes WHERE indexname = %s",
        "sqlite": "SELECT sql FROM sqlite_master WHERE name = %s",
    }[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(question, [index])
        (definition,) = cursor.fetchone()
    assert condition in definition.partition(" WHERE ")[2]


def test_longest_key_and_scope(alias: str) -> None:
    """255 characters fit into both at once, and are told apart to the last."""
    create(alias, key="k" * 255, scope="s" * 255)
    create(alias, key="k" * 255, scope="s" * 254 + "S")
    assert IdempotencyKey.objects.using(alias).filter(scope="s" * 255).count() == 1


# A database in which ``migrate`` was forgotten.


STEPS = IdempotencyStep._meta.db_table
MISSING = {
    "table": (f"ALTER TABLE {TABLE} RENAME TO away", f"ALTER TABLE away RENAME TO {TABLE}"),
    "column": (
        f"ALTER TABLE {TABLE} RENAME COLUMN hold TO away",
        f"ALTER TABLE {TABLE} RENAME COLUMN away TO hold",
    ),
    "steps": (f"ALTER TABLE {STEPS} RENAME TO away", f"ALTER TABLE away RENAME TO {STEPS}"),
}
"""What a migration would have made: how it goes away, and how it comes back."""


@pytest.fixture(params=MISSING)
def missing(request: pytest.FixtureRequest, alias: str) -> Iterator[str]:
    """What is not there."""
    away, back = MISSING[request.param]
    with connections[alias].cursor() as cursor:
        cursor.execute(away)
    yield request.param
    with connections[alias].cursor() as cursor:
        cursor.execute(back)


def test_claim_without_migrations(alias: str, missing: str) -> None:
    """A claim, and what follows it, says what to do, and not that the database is away."""
    store = DatabaseStore("default", using=alias)
    operation = an_operation(lease=timedelta(seconds=30))
    with pytest.raises(ImproperlyConfigured, match=r"manage.py migrate"):
        store.steps(store.acquire(operation))  # type: ignore[arg-type]  # a claim, or an error
