"""Finding a record in the admin by its path and its caller, and who sees its fingerprint."""

from __future__ import annotations

from typing import Any

import pytest
from django.conf import settings
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext, override_settings

from idempotency_django.admin import changelist
from idempotency_django.models import IdempotencyKey
from tests.support.admin_pages import LIST, alias, member
from tests.support.factories import record
from tests.support.plans import rows_read

__all__ = ["alias"]  # a fixture

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


@pytest.fixture
def auditor() -> Client:
    """Somebody who may see records, but no responses."""
    return member("view_idempotencykey")


def found(client: Client, text: str, **query: Any) -> set[str]:
    """The keys that a search lists."""
    response = client.get(LIST, {"q": text, **query})
    assert response.status_code == 200
    return {listed.key for listed in response.context["cl"].result_list}


class TestSearch:
    """By path and by principal, which no index knows."""

    @pytest.mark.parametrize(
        ("text", "keys"),
        [
            ("/api/orders/1", {"a", "b"}),
            ("/api/orders/17/", {"b"}),
            ("/kunden/m\N{LATIN SMALL LETTER U WITH DIAERESIS}ller/", {"c"}),
            ("user:8", {"a", "b"}),
            ("user:81", {"b"}),
            ("tenant:1", {"c"}),
            ("orders", set()),
            ("/api/%", set()),
            ("x", {"x"}),
        ],
    )
    def test_beginning(self, alias: str, auditor: Client, text: str, keys: set[str]) -> None:
        """A search finds the paths and the principals that begin with it."""
        record(alias, key="a", scope="s", path="/api/orders/1/", principal="user:8")
        record(alias, key="b", scope="s", path="/api/orders/17/", principal="user:81")
        record(alias, key="c", scope="s", path="/kunden/müller/", principal="tenant:1")
        record(alias, key="x", scope="s")
        assert found(auditor, text) == keys

    def test_among_the_newest(
        self, alias: str, auditor: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It looks at the newest records; keys are found always."""
        for number in range(4):
            record(alias, key=f"k{number}", scope="s", path="/api/")
        monkeypatch.setattr(changelist, "NEWEST", 2)
        assert found(auditor, "/api/") == {"k2", "k3"}
        assert found(auditor, "k0") == {"k0"}

    def test_help(self, auditor: Client) -> None:
        """The page says how far the search reaches."""
        said = auditor.get(LIST).content.decode()
        reach = (
            f"Among the newest {changelist.NEWEST:,} records, it also finds the last "
            f"{changelist.FOUND}"
        )
        assert reach in said


FILL = """
INSERT INTO idempotency_django_idempotencykey (
    key, scope, operation, fingerprint, status, attempt, owner_token, response_status,
    response_headers, response_body, error, created_at, completed_at, expires_at, purge_at,
    replay_count, principal, method, path)
SELECT md5(n::text), 'user:' || mod(n, 5000) || '|POST /api/charges/', 'POST /api/charges/',
    repeat('f', 64), 'completed', 1, '', 201, '[]', decode(md5(n::text), 'hex'), '',
    now() - n * interval '1 second', now(), now(), now() + interval '1 hour', 0,
    'user:' || mod(n, 5000), 'POST', '/api/charges/' || mod(n, 300) || '/'
FROM generate_series(1, %s) n
"""


@pytest.mark.skipif("postgres" not in settings.ALIASES, reason="the plans are PostgreSQL's")
def test_big_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for a path or a caller looks at no more rows than the newest records."""
    monkeypatch.setattr(changelist, "NEWEST", 10_000)
    using = settings.ALIASES["postgres"]
    with connections[using].cursor() as cursor:
        cursor.execute(FILL, [100_000])
        cursor.execute(f"VACUUM ANALYZE {IdempotencyKey._meta.db_table}")
    store = {
        "BACKEND": "idempotency_django.stores.database.DatabaseStore",
        "OPTIONS": {"using": using},
    }
    client = member("view_idempotencykey")
    with override_settings(IDEMPOTENCY={"STORES": {"default": store}}):
        for text in ("/api/charges/17/", "/api/charges/", "/nowhere/", "user:4711"):
            with CaptureQueriesContext(connections[using]) as asked:
                assert client.get(LIST, {"q": text}).status_code == 200
            statements = [q["sql"] for q in asked if IdempotencyKey._meta.db_table in q["sql"]]
            assert 0 < len(statements) <= 6
            for sql in statements:
                assert rows_read(using, sql) <= changelist.NEWEST + 1, sql[:200]


class TestFingerprint:
    """A digest of what was asked for, which a guess can be compared with."""

    def test_without_the_permission(self, alias: str, auditor: Client) -> None:
        """Without ``view_response`` it is neither shown nor fetched, on no page."""
        made = record(alias, fingerprint="f00d" * 16)
        with CaptureQueriesContext(connections[alias]) as queries:
            pages = [
                auditor.get(url).content.decode() for url in (LIST, f"{LIST}{made.pk}/change/")
            ]
        assert [page for page in pages if "f00d" in page] == []
        column = connections[alias].ops.quote_name("fingerprint")
        assert [query for query in queries if column in query["sql"]] == []

    def test_with_the_permission(self, alias: str) -> None:
        """Holders of ``view_response`` see it on the page of the record, and not in the list."""
        made = record(alias, fingerprint="f00d" * 16)
        holder = member("view_idempotencykey", "view_response")
        assert "f00d" * 16 in holder.get(f"{LIST}{made.pk}/change/").content.decode()
        assert "f00d" not in holder.get(LIST).content.decode()

    def test_not_filtered_by(self, alias: str) -> None:
        """Nobody finds out what it begins with by asking which records have it."""
        record(alias)
        holder = member("view_idempotencykey", "view_response")
        for lookup in ("fingerprint=f", "fingerprint__startswith=f"):
            assert holder.get(f"{LIST}?{lookup}").status_code == 400
