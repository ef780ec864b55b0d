"""The statements of the page on purging are taken by PostgreSQL, and do what the page says."""

from __future__ import annotations

import re

import pytest
from django.db import connection

from idempotency_django.models import IdempotencyKey
from tests.docs.examples import ROOT

PAGE = ROOT / "docs" / "operations" / "deploy.md"

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="needs PostgreSQL"),
    pytest.mark.django_db(transaction=True),
]


def documented() -> list[str]:
    """The SQL of the page, block by block."""
    return re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)


def indexes() -> dict[str, int]:
    """The files of the table's indexes; a rebuilt index has a new one."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname, relfilenode FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid"
            " WHERE indrelid = %s::regclass",
            [IdempotencyKey._meta.db_table],
        )
        return dict(cursor.fetchall())


def test_reindex() -> None:
    """The indexes of the table are rebuilt, all of them, and keep their names."""
    reindex, _ = documented()
    before = indexes()
    with connection.cursor() as cursor:
        cursor.execute(reindex)
    after = indexes()
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())


def test_density() -> None:
    """The density of every index of the table is shown."""
    _, density = documented()
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'pgstattuple'")
        if not cursor.fetchone():
            pytest.skip("This server has no pgstattuple.")
        extension, select = density.strip().split(";\n")
        cursor.execute(extension)
        cursor.execute(select)
        assert {name for name, _ in cursor.fetchall()} == set(indexes())
