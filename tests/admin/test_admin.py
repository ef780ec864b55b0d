"""The admin: what it shows to whom, what it reads for that, and what an operator can do."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext, override_settings
from django.utils import timezone

from idempotency_django import admin
from idempotency_django.admin import IdempotencyKeyAdmin, base
from idempotency_django.contrib.timeline import Entry, Member, Records, member_of, trace
from idempotency_django.models import IdempotencyKey, IdempotencyStep
from idempotency_django.stores.records import reference
from tests.support.admin_pages import ALIASES, LIST, act, alias, detail, forgotten, member, page
from tests.support.factories import IdempotencyKeyFactory, ago, copies, record, records, step
from tests.support.plans import rows_read

__all__ = ["alias", "forgotten"]  # fixtures

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

DAY = timedelta(days=1)
EVERYTHING = ["view_idempotencykey", "view_response", "settle"]
SECRETS = ["alice@example.org", "bob@example.org", "/api/charges/17/", "5ec2e7", "f" * 64]
"""What is in a response, in an error, in a header, in an owner's token and in a fingerprint."""


@pytest.fixture
def auditor() -> Client:
    """Somebody who may see records, and neither responses nor buttons."""
    return member("view_idempotencykey")


@pytest.fixture
def operator() -> Client:
    """Somebody who may do all that can be done."""
    return member(*EVERYTHING)


def listed(client: Client, **query: Any) -> list[str]:
    """The keys in the list, in its order."""
    response = client.get(LIST, query)
    assert response.status_code == 200, response.headers
    return [found.key for found in response.context["cl"].result_list]


class TestList:
    """The list of records."""

    def test_what_it_tells(self, alias: str, operator: Client) -> None:
        """Each row tells status, operation, attempt, replays and time."""
        record(alias, key="the-a!", replay_count=11, attempt=7)
        record(alias, key="the-b!", permanent=True)
        record(alias, key="the-c!", failed=True)
        record(alias, key="the-d!", in_progress=True)
        record(alias, key="the-f!", interrupted=True)
        record(alias, key="the-g!", held=True)
        rows = page(operator, LIST).split("<tbody>")[1].split("</tbody>")[0].split("<tr")[1:]
        texts = {next(key for key in "abcdfg" if f"the-{key}!" in row): row for row in rows}
        told = {
            "a": [">completed<", "201", ">7<", ">11<"],
            "b": ["POST /api/charges/"],
            "c": [">failed<"],
            "d": [">in progress<"],
            "f": [">interrupted<"],
            "g": [">held<"],
        }
        assert list(texts) == list("gfdcba")  # the newest first
        assert {key: [w for w in words if w not in texts[key]] for key, words in told.items()} == {
            key: [] for key in told
        }

    def test_nothing_personal(self, alias: str, operator: Client) -> None:
        """Nothing of a response or an error is in a list, or even asked of the database."""
        record(alias)
        record(alias, failed=True)
        with CaptureQueriesContext(connections[alias]) as queries:
            said = page(operator, LIST)
        assert [secret for secret in SECRETS if secret in said] == []
        asked = "".join(query["sql"] for query in queries).replace("IS NOT NULL", "")
        names = connections[alias].ops.quote_name
        for column in ("response_headers", "error", "owner_token", "fingerprint"):
            assert names(column) not in asked
        assert f"{names('response_body')}," not in asked
        assert "example.org" not in str(IdempotencyKeyFactory.build())

    @pytest.mark.parametrize(
        "lookup",
        [
            "response_body__startswith=a",
            "owner_token=5",
            "steps__result__contains=17",
            "fingerprint__startswith=f",
        ],
    )
    def test_secrets_cannot_be_filtered_by(self, operator: Client, lookup: str) -> None:
        """Nobody finds out what is in a response by asking which records have it."""
        assert operator.get(f"{LIST}?{lookup}").status_code == 400
        assert operator.get(f"{LIST}?attempt=1").status_code == 200

    def test_no_query_per_row(self, alias: str, operator: Client) -> None:
        """The number of queries does not depend on the number of rows."""
        record(alias)
        with CaptureQueriesContext(connections[alias]) as few:
            page(operator, LIST)
        records(20, alias)
        records(20, alias, held=True)
        with CaptureQueriesContext(connections[alias]) as many:
            page(operator, LIST)
        assert len(many) == len(few)

    @pytest.mark.skipif(len(ALIASES) < 2, reason="a replica takes two databases")
    def test_never_a_replica(self, operator: Client) -> None:
        """All that is asked of the records is asked where the default store writes them."""
        made = record(ALIASES[0], held=True)
        with (
            override_settings(DATABASE_ROUTERS=[ReadsElsewhere()]),
            CaptureQueriesContext(connections[ALIASES[-1]]) as queries,
        ):
            page(operator, LIST)
            page(operator, detail(made))
            act(operator, "settle", made, outcome="release", status=200, reason="-")
        assert IdempotencyKey.objects.using(ALIASES[0]).get().status == "failed"
        assert [query["sql"] for query in queries] == []


class ReadsElsewhere:
    """A router that sends reads of the records to another database."""

    def db_for_read(self, model: type, **hints: object) -> str | None:
        return ALIASES[-1] if model is IdempotencyKey else None

    db_for_write = db_for_read


class TestFinding:
    """Filters, search and pages."""

    @pytest.mark.parametrize(
        ("query", "found"),
        [
            ({"state": "in_progress"}, {"in_progress"}),
            ({"state": "interrupted"}, {"interrupted"}),
            ({"state": "held"}, {"held"}),
            (
                {"state": "completed"},
                {"stored", "permanent", "tombstone", "expired", "purgeable"},
            ),
            ({"state": "klingon", "q": "POST /other/"}, {"permanent"}),
            ({"q": "POST /other/", "state": "failed"}, set()),
        ],
    )
    def test_filters(
        self, alias: str, auditor: Client, query: dict[str, str], found: set[str]
    ) -> None:
        """Records are told apart by status and operation."""
        record(alias, key="stored")
        record(alias, key="permanent", permanent=True, operation="POST /other/")
        traits = "failed in_progress interrupted held tombstone expired purgeable"
        for trait in traits.split():
            record(alias, key=trait, **{trait: True})
        assert set(listed(auditor, **query)) == found

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("order-", {"order-17", "order-18"}),
            (" order-17 ", {"order-17"}),
            ("Order-17", set()),
            ("order_17", set()),
            ("user:42|", {"order-18", "~"}),
            ("~", {"~"}),
            ("", {"order-17", "order-18", "~"}),
            ("/api/orders/1", {"order-17", "order-18"}),
            ("/kunden/müller/", {"~"}),
            ("user:81", {"order-18"}),
            ("orders", set()),
            ("/api/%", set()),
        ],
    )
    def test_search(self, alias: str, auditor: Client, text: str, found: set[str]) -> None:
        """A search finds the keys, scopes, paths and callers that begin with it, to the letter."""
        for key, scope, path, principal in (
            ("order-17", "user:1|POST /api/charges/", "/api/orders/1/", "user:8"),
            ("order-18", "user:42|POST /api/charges/", "/api/orders/17/", "user:81"),
            ("~", "user:42|POST /x/", "/kunden/müller/", "tenant:1"),
        ):
            record(alias, key=key, scope=scope, path=path, principal=principal)
        assert set(listed(auditor, q=text)) == found

    def test_search_among_the_newest(
        self, alias: str, auditor: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It looks at the newest records, as the page says; keys are found always."""
        reach = f"Among the newest {admin.NEWEST:,} records, it also finds the last {admin.FOUND}"
        assert reach in auditor.get(LIST).content.decode()
        for number in range(4):
            record(alias, key=f"k{number}", scope="s", path="/api/")
        monkeypatch.setattr(admin, "NEWEST", 2)
        assert set(listed(auditor, q="/api/")) == {"k2", "k3"}
        assert listed(auditor, q="k0") == ["k0"]

    @pytest.mark.skipif("postgres" not in settings.ALIASES, reason="the rest knows no other order")
    def test_prefixes_are_in_the_index(self) -> None:
        """PostgreSQL sorts keys and scopes byte by byte, whatever the language of the database."""
        with connections[settings.ALIASES["postgres"]].cursor() as cursor:
            cursor.execute(
                "SELECT column_name FROM information_schema.columns "
                "WHERE table_name = %s AND collation_name = 'C'",
                [IdempotencyKey._meta.db_table],
            )
            sorted_by_bytes = {name for (name,) in cursor.fetchall()}
        assert {"key", "scope"} <= sorted_by_bytes

    def test_many_records(
        self, alias: str, auditor: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Records are counted up to a limit, and the page says where the others are."""
        monkeypatch.setattr(IdempotencyKeyAdmin, "list_per_page", 2)
        records(3, alias)
        hint = "To find others, search or filter."
        for counted, said, pages in ((2, 2, 1), (3, 3, 2), (4, 3, 2)):
            monkeypatch.setattr(base, "COUNTED", counted)
            response = auditor.get(LIST)
            assert response.context["cl"].result_count == said
            assert response.context["cl"].paginator.num_pages == pages
            assert (hint in response.content.decode()) == (counted < 3)


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
def test_big_table(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of any query of the list looks at more rows than the newest that a filter looks at.

    So it opens as fast with ten million records as with these, whatever filter, page or prefix is
    asked for.
    """
    monkeypatch.setattr(admin, "NEWEST", base.COUNTED)
    many, using = 200_000, settings.ALIASES["postgres"]
    with connections[using].cursor() as cursor:
        cursor.execute(FILL, [many])
        cursor.execute(f"VACUUM ANALYZE {IdempotencyKey._meta.db_table}")
    backend = "idempotency_django.stores.database.DatabaseStore"
    store = {"BACKEND": backend, "OPTIONS": {"using": using}}
    queries: list[dict[str, Any]] = [
        {},
        {"p": 100},
        {"q": "00ab"},
        {"q": "user:4711|"},
        {"q": "user:4711"},
        {"q": "/api/charges/17/"},
        {"q": "/nowhere/"},
        {"q": "POST /api/charges/"},
        {"state": "in_progress"},
        {"state": "interrupted"},
        {"state": "held"},
        {"state": "completed"},
        {"state": "failed"},
        {"state": "failed", "q": "POST /nowhere/"},
    ]
    with override_settings(IDEMPOTENCY={"STORES": {"default": store}}):
        for query in queries:
            with CaptureQueriesContext(connections[using]) as asked:
                page(operator, LIST, **query)
            statements = [
                q["sql"] for q in asked if "idempotency_django_idempotencykey" in q["sql"]
            ]
            # One more finds paths and principals, or what is in progress without a lease.
            assert 2 <= len(statements) <= 4 + ("q" in query or "state" in query)
            for sql in statements:
                assert rows_read(using, sql) <= admin.NEWEST + 1, (query, sql)


class TestDetail:
    """The page of one record."""

    def test_request_and_timeline(self, alias: str, auditor: Client) -> None:
        """It tells what was asked, and in order what became of it."""
        now = timezone.now()
        made = record(
            alias,
            key="the-key",
            attempt=3,
            replay_count=2,
            # Each in the middle of its unit, however long a month is and the page takes.
            created_at=now - timedelta(hours=5, minutes=30),
            completed_at=now - timedelta(hours=4, minutes=30),
            last_replayed_at=now - timedelta(hours=2, minutes=5),
            expires_at=now + timedelta(hours=18, minutes=30),
            purge_at=now + timedelta(days=45),
        )
        said = page(auditor, detail(made))
        for fact in ("the-key", made.scope, made.operation, "POST /api/charges/"):
            assert fact in said
        told = [
            " ".join(item.split())
            for item in said.split("idempotency-timeline")[1].split("<li")[1:]
        ]
        for item, words in zip(
            told,
            (
                ["Attempt 3 began"],
                ["Completed"],
                ["Replayed 2 times, last"],
                ["quiet", "Expires"],
                ["quiet", "May be purged"],
            ),
            strict=True,
        ):
            assert [word for word in words if word not in item] == []

    def test_causes(self, alias: str, auditor: Client) -> None:
        """The page links to what has caused the operation, and says where that is gone."""
        cause = record(alias, key="request", operation="POST /shop/")
        caused = record(alias, caused_by=reference(cause.key, cause.scope))
        assert f'href="{detail(cause)}"' in page(auditor, detail(caused))
        alone = record(alias, caused_by=reference("purged", "a scope"))
        assert "Purged, rolled back or elsewhere: purged" in page(auditor, detail(alone))
        assert "Causes" not in page(auditor, detail(record(alias)))

    @pytest.mark.skipif("postgres" not in settings.ALIASES, reason="the plan is PostgreSQL's")
    def test_children_are_in_the_index(self) -> None:
        """PostgreSQL finds them by the partial index, not by reading all records."""
        using = settings.ALIASES["postgres"]
        parent = record(using, key="parent")
        copies(3000, record(using))
        record(using, caused_by=reference(parent.key, parent.scope))
        with connections[using].cursor() as cursor:
            cursor.execute(f"ANALYZE {IdempotencyKey._meta.db_table}")
        with CaptureQueriesContext(connections[using]) as queries:
            assert [depth for depth, _ in trace(member_of(parent)).members] == [0, 1]
        asked = f'"{IdempotencyKey._meta.db_table}"."caused_by" IN'
        by_cause = [query["sql"] for query in queries if asked in query["sql"]]
        assert len(by_cause) == 2
        assert all(rows_read(using, sql) <= 2 for sql in by_cause)

    @pytest.mark.parametrize("traits", [{}, {"failed": True}])
    def test_without_the_permission(
        self, alias: str, traits: dict[str, bool], auditor: Client
    ) -> None:
        """Without it the response is not shown, nor fetched, and the page says what is needed."""
        made = record(alias, **traits)
        with CaptureQueriesContext(connections[alias]) as queries:
            said = page(auditor, detail(made))
        assert [secret for secret in SECRETS if secret in said] == []
        assert "“Can see the stored responses of idempotency keys”" in said
        asked = "".join(query["sql"] for query in queries).replace("IS NOT NULL", "")
        for column in ("response_headers", "error", "owner_token", "fingerprint"):
            assert connections[alias].ops.quote_name(column) not in asked

    def test_json(self, alias: str, operator: Client) -> None:
        """With the permission the response is there: status, headers, and the body as it is."""
        body = b'{"id":17,"amount":10.50,"amount":1e2,"none":[],"deep":{"a":["x, y"]}}'
        said = page(operator, detail(record(alias, response_body=body)))
        assert "201 Created" in said
        assert '<tr><th scope="row">Location</th><td>/api/charges/17/</td></tr>' in said
        assert body.decode() in said
        assert "f" * 64 in said
        assert "5ec2e7" not in said  # the owner's token, which nobody sees

    def test_html_is_text(self, alias: str, operator: Client) -> None:
        """A response in HTML, and whatever a header or an error holds, is shown and never run."""
        script = "<script>alert(1)</script>"
        headers = json.dumps([["Content-Type", "text/html; charset=utf-8"], ["X", script]])
        made = record(alias, response_headers=headers, response_body=f"ü{script}".encode())
        failed = record(alias, failed=True, error=script)
        for shown in (made, failed):
            response = operator.get(detail(shown)).content.decode()
            assert "<script>alert" not in response
            assert "&lt;script&gt;alert(1)" in response
        assert f"ü{script}" in page(operator, detail(made))

    @pytest.mark.parametrize(
        ("traits", "words"),
        [
            ({"tombstone": True}, ["201 Created", "The operation was executed"]),
            ({"response_body": b""}, ["201 Created", "The body is empty."]),
            ({"failed": True}, ["bob@example.org was declined", "No response is stored."]),
            (
                {"response_headers": "[]", "response_body": b"\x00\x01PDF" + b"\xff" * 400},
                ["405\xa0bytes", "PDF\\xff\\xff"],
            ),
        ],
    )
    def test_other_responses(
        self, alias: str, operator: Client, traits: dict[str, Any], words: list[str]
    ) -> None:
        """Tombstones, empty and binary responses and failures are told for what they are."""
        said = page(operator, detail(record(alias, **traits)))
        assert [word for word in words if word not in said] == []

    def test_result(self, alias: str, operator: Client) -> None:
        """What a task, a call or a consumer returned is a result, and no response of HTTP."""
        made = record(alias, method="TASK", path="", response_status=200)
        told = page(operator, detail(made))
        assert "<h3>Result</h3>" in told
        assert "alice@example.org" in told
        for said in (told, page(operator, LIST)):
            assert not re.search(r"\b200\b|Content-Type", said.partition("<main")[2])

    def test_steps(self, alias: str, operator: Client, auditor: Client) -> None:
        """Steps are in the timeline; what they returned is text, and shown with the responses."""
        now = timezone.now()
        made = record(alias, held=True, attempt=2, created_at=now - timedelta(minutes=9))
        script = json.dumps({"note": "<script>alert(1)</script>"})
        # The first step is older than the attempt that is running: another one made it.
        first = ago(minutes=12)
        step(made, name="<i>debit</i>", result=script, completed_at=first)
        step(made, name="ledger", attempt=2, result='"5ec2e7"')
        step(record(alias), name="somebody else's")
        said = page(operator, detail(made))
        told = said.split("idempotency-timeline")[1].split("<li")[1:]
        expected = [
            "Step <i>debit</i>, by attempt 1",
            "Attempt 2 began",
            "Step ledger, by attempt 2",
            "Lease ended",
            "Expires",
        ]
        for item, words in zip(told, expected, strict=True):
            assert words in item
        assert script in told[0]
        assert "Retries are refused until" in said
        raw = operator.get(detail(made)).content.decode()
        assert "<script>alert" not in raw
        assert "<i>" not in raw
        with CaptureQueriesContext(connections[alias]) as queries:
            public = page(auditor, detail(made))
        assert "Step ledger, by attempt 2" in public
        assert "alert(1)" not in public
        result = f"{IdempotencyStep._meta.db_table}.result"
        asked = "".join(query["sql"] for query in queries)
        assert result not in asked.replace('"', "").replace("`", "")

    def test_no_query_per_step(self, alias: str, operator: Client) -> None:
        """A page costs the same, however many steps the record has."""
        made = record(alias, held=True)
        page(operator, detail(made))  # the content types are asked for once
        counts = []
        for count in (0, 1, 30):
            for number in range(IdempotencyStep.objects.using(alias).count(), count):
                step(made, number)
            with CaptureQueriesContext(connections[alias]) as queries:
                page(operator, detail(made))
            counts.append(len(queries))
        assert len(set(counts)) == 1

    def test_long_text(self, alias: str, operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """A long text is cut."""
        monkeypatch.setattr("idempotency_django.admin.LONGEST_TEXT", 10)
        made = record(alias, response_body=b"0123456789a")
        assert ">0123456789<" in page(operator, detail(made))


class TestReadOnly:
    """What nobody can do, and what takes a permission."""

    def test_nothing_is_added_or_changed(self, operator: Client) -> None:
        """Records are neither added nor changed by hand."""
        made = record()
        assert operator.get(f"{LIST}add/").status_code == 403
        assert operator.post(detail(made), {"key": "other"}).status_code == 403
        assert 'method="post"' not in page(operator, detail(made)).split("<main")[1].replace(
            'method="post" id="idempotencykey_form"', ""
        )

    @pytest.mark.parametrize("path", ["", "change/"])
    def test_strangers(self, path: str) -> None:
        """Who may not view records sees none, even with the permission to see responses."""
        made = record()
        client = member("view_response")
        assert client.get(f"{LIST}{made.pk}/change/" if path else LIST).status_code == 403

    def test_never_as_django_deletes(self) -> None:
        """Django's own way would delete what is in use, and forget no cached response."""
        made = record()
        client = Client()
        client.force_login(User.objects.create_superuser("root"))
        assert client.post(detail(made, "delete"), {"post": "yes"}).status_code == 403
        assert "delete_selected" not in page(client, LIST)


NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)


class TestTimeline:
    """Entries, told against the database's clock."""

    def test_exactly(self) -> None:
        """The exact moment has milliseconds and a time zone, where the project has time zones."""
        life = Member(kind="record", reference="k s", title="")
        with timezone.override("Europe/Berlin"):
            entry = Entry(at=NOW, now=NOW, what="created", member=life)
            assert (entry.exactly, entry.ahead) == ("2030-01-01 13:00:00.000 CET", False)
        naive = NOW.replace(tzinfo=None)
        later = Entry(at=naive + DAY, now=naive, what="expires", member=life)
        assert (later.exactly, later.ahead) == ("2030-01-02 12:00:00.000", True)

    @pytest.mark.parametrize(
        ("traits", "told"),
        [
            ({"permanent": True}, ["created", "completed"]),
            ({"failed": True}, ["created", "failed", "may be purged"]),
            (
                {"in_progress": True, "lease_expires_at": NOW + timedelta(seconds=30)},
                ["created", "lease ends", "expires", "may be purged"],
            ),
            (  # which no purge deletes
                {"in_progress": True, "lease_expires_at": NOW, "hold": True},
                ["created", "lease ended", "expires"],
            ),
        ],
    )
    def test_events(self, traits: dict[str, Any], told: list[str]) -> None:
        """A record's life is told in order, for as much of it as there is."""
        made: Any = IdempotencyKeyFactory.build(created_at=NOW, **traits)
        made.now = NOW
        life = Member(kind="record", reference="k s", title="", row=made)
        entries = sorted(Records("default").moments(life), key=lambda each: each.at)
        assert [entry.what for entry in entries] == told
