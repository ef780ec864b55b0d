"""The admin: what it shows to whom, what it reads for that, and what an operator can do."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.contrib.admin import site
from django.contrib.admin.models import DELETION, LogEntry
from django.contrib.auth.models import User
from django.db import connections
from django.http import HttpResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext, override_settings
from django.utils import timezone

from idempotency_django.admin import IdempotencyKeyAdmin, base, changelist
from idempotency_django.contrib.timeline import MOST, Member, Moment, Records, member_of, trace
from idempotency_django.models import IdempotencyKey, IdempotencyStep
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import Claim, Operation, reference
from idempotency_django.testing import an_operation
from tests.stores.test_purge import held
from tests.support.admin_pages import (
    ALIASES,
    LIST,
    alias,
    detail,
    forgotten,
    member,
    messages,
    page,
)
from tests.support.factories import IdempotencyKeyFactory, ago, copies, record, records, step
from tests.support.plans import rows_read

__all__ = ["alias", "forgotten"]  # fixtures

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

DAY = timedelta(days=1)
EVERYTHING = ["view_idempotencykey", "view_response", "delete_idempotencykey"]
SECRETS = ["alice@example.org", "bob@example.org", "/api/charges/17/", "5ec2e7"]
"""What is in a response, in an error, in a header and in an owner's token."""


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
        """Each row tells status, operation, scope, attempt, replays and ages."""
        record(alias, key="a", replay_count=11, attempt=7, created_at=ago(hours=5))
        record(alias, key="b", tombstone=True, permanent=True)
        record(alias, key="c", failed=True)
        record(alias, key="d", in_progress=True)
        record(alias, key="e", expired=True)
        record(alias, key="f", interrupted=True, created_at=ago(days=3))
        record(alias, key="g", held=True, created_at=ago(days=4))
        rows = page(operator, LIST).split("<tbody>")[1].split("</tbody>")[0].split("</tr>")
        texts = {row.partition('title="')[2][0]: row for row in rows if "title=" in row}
        told = {
            "a": ["completed", "201", ">7<", ">11<", "5\xa0hours\xa0ago", "in\xa018\xa0hours"],
            "b": ["response not stored", ">never<", ">now<", "POST /api/charges/"],
            "c": ["failed", ">–<", "user:1|POST /api/charges/"],
            "d": ["in progress"],
            "e": ["1\xa0day\xa0ago"],
            "f": [">interrupted<"],
            "g": [">held<"],
        }
        assert list(texts) == list("gfedcba")  # the newest first
        assert {key: [w for w in words if w not in texts[key]] for key, words in told.items()} == {
            key: [] for key in told
        }
        assert "response not stored" not in texts["a"] + texts["c"] + texts["d"]

    def test_long_texts_are_cut(self, alias: str, auditor: Client) -> None:
        """A long key or scope does not blow up the list; the whole of it is a tooltip."""
        record(alias, key="k" * 255, scope="s" * 255)
        said = page(auditor, LIST)
        assert f'<span title="{"k" * 255}">{"k" * 39}…</span>' in said
        assert f'<span title="{"s" * 255}">{"s" * 59}…</span>' in said

    def test_nothing_personal(self, alias: str, operator: Client) -> None:
        """Nothing of a response or an error is in a list, or even asked of the database."""
        record(alias)
        record(alias, failed=True)
        with CaptureQueriesContext(connections[alias]) as queries:
            said = page(operator, LIST)
        assert [secret for secret in SECRETS if secret in said] == []
        asked = "".join(query["sql"] for query in queries).replace("IS NOT NULL", "")
        names = connections[alias].ops.quote_name
        for column in ("response_headers", "error", "owner_token"):
            assert names(column) not in asked
        assert f"{names('response_body')}," not in asked
        assert "example.org" not in str(IdempotencyKeyFactory.build())

    @pytest.mark.parametrize(
        "lookup",
        [
            "response_body__startswith=a",
            "error__contains=bob",
            "owner_token=5",
            "response_headers=[]",
            "steps__result__contains=17",
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
        made = record(ALIASES[0])
        with (
            override_settings(DATABASE_ROUTERS=[ReadsElsewhere()]),
            CaptureQueriesContext(connections[ALIASES[-1]]) as queries,
        ):
            page(operator, LIST)
            page(operator, detail(made))
            operator.post(detail(made, "remove"))
        assert not IdempotencyKey.objects.using(ALIASES[0]).exists()
        assert [query["sql"] for query in queries] == []

    def test_a_store_without_a_database(self, operator: Client) -> None:
        """Where the default store is no database, the admin shows the records that are there."""
        record(key="left-over")
        memory = {"BACKEND": "idempotency_django.stores.memory.MemoryStore"}
        with override_settings(IDEMPOTENCY={"STORES": {"default": memory}}):
            assert listed(operator) == ["left-over"]


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
            ({"state": "failed"}, {"failed"}),
            ({"state": "in_progress"}, {"in_progress"}),
            ({"state": "interrupted"}, {"interrupted"}),
            ({"state": "held"}, {"held"}),
            (
                {"state": "completed"},
                {"stored", "permanent", "tombstone", "expired", "purgeable"},
            ),
            ({"state": "klingon", "q": "POST /other/"}, {"permanent"}),
            ({"q": "POST /other/"}, {"permanent"}),
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
            ("rder-17", set()),
            ("order_17", set()),
            ("%", set()),
            ("user:42|", {"order-18", "~"}),
            ("user:42|POST /x", {"~"}),
            ("~", {"~"}),
            ("ördér", set()),
            ("", {"order-17", "order-18", "~"}),
        ],
    )
    def test_search(self, alias: str, auditor: Client, text: str, found: set[str]) -> None:
        """A search finds the keys and the scopes that begin with it, to the letter."""
        record(alias, key="order-17", scope="user:1|POST /api/charges/")
        record(alias, key="order-18", scope="user:42|POST /api/charges/")
        record(alias, key="~", scope="user:42|POST /x/")
        assert set(listed(auditor, q=text)) == found

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
    now() - n * interval '1 second', now(), now(), now() + interval '1 hour', 0, '', 'POST', ''
FROM generate_series(1, %s) n
"""


@pytest.mark.skipif("postgres" not in settings.ALIASES, reason="the plans are PostgreSQL's")
def test_big_table(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of any query of the list looks at more rows than the newest that a filter looks at.

    So it opens as fast with ten million records as with these, whatever filter, page or prefix is
    asked for.
    """
    monkeypatch.setattr(changelist, "NEWEST", base.COUNTED)
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
                assert rows_read(using, sql) <= changelist.NEWEST + 1, (query, sql)


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
                ["Attempt 3 began", "5 hours ago"],
                ["Completed", "4 hours ago"],
                ["Replayed 2 times, last", "2 hours ago"],
                ["quiet", "Expires", "in 18 hours"],
                ["quiet", "May be purged", "in 1 month"],
            ),
            strict=True,
        ):
            assert [word for word in words if word not in item.replace("\xa0", " ")] == []

    def test_causes(self, alias: str, auditor: Client) -> None:
        """The page links to all operations of its chain of causes, from the first to the last."""
        request = record(alias, key="request", operation="POST /shop/")
        caused_by = reference(request.key, request.scope)
        first = record(alias, key="first", operation="book", caused_by=caused_by)
        second = record(alias, key="second", failed=True, caused_by=caused_by)
        last = record(alias, key="last", caused_by=reference("first", first.scope))
        alone = record(alias, key="alone", caused_by=reference("purged", "a scope"))
        links = {
            made.key: [
                other.key
                for other in (request, first, second, last, alone)
                if other is not made and f'href="{detail(other)}"' in page(auditor, detail(made))
            ]
            for made in (request, first, second, last, alone)
        }
        assert links == {
            "request": ["first", "second", "last"],
            "first": ["request", "second", "last"],
            "second": ["request", "first", "last"],
            "last": ["request", "first", "second"],
            "alone": [],
        }
        assert "Purged, rolled back or elsewhere: purged" in page(auditor, detail(alone))
        assert "Causes" not in page(auditor, detail(record(alias)))

    def test_many_children(self, alias: str, auditor: Client) -> None:
        """Of many, the first are listed, and what is not listed is not hidden."""
        parent = record(alias, key="parent")
        caused_by = reference(parent.key, parent.scope)
        records(MOST, alias, caused_by=caused_by)
        said = page(auditor, detail(parent))
        assert said.split("idempotency-chain")[1].count("POST /api/charges/</a>") == MOST - 1
        assert f"Only {MOST} are listed" in said

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
        for column in ("response_headers", "error", "owner_token"):
            assert connections[alias].ops.quote_name(column) not in asked

    def test_json(self, alias: str, operator: Client) -> None:
        """With the permission the response is there: status, headers, and the body as it is."""
        body = b'{"id":17,"amount":10.50,"amount":1e2,"none":[],"deep":{"a":["x, y"]}}'
        said = page(operator, detail(record(alias, response_body=body)))
        assert "201 Created" in said
        assert '<tr><th scope="row">Location</th><td>/api/charges/17/</td></tr>' in said
        assert body.decode() in said
        assert "5ec2e7" not in said  # the owner's token, which nobody sees

    def test_superuser(self, alias: str) -> None:
        """A superuser sees responses."""
        client = Client()
        client.force_login(User.objects.create_superuser("root"))
        assert "alice@example.org" in page(client, detail(record(alias)))

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
            ({"response_status": 299}, ["<h3>299</h3>"]),
            ({"failed": True}, ["bob@example.org was declined", "No response is stored."]),
            ({"in_progress": True}, ["No response is stored."]),
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

    def test_purged_meanwhile(self, alias: str, operator: Client) -> None:
        """A record that is purged while its page is made has no response."""
        made = record(alias)
        shown = IdempotencyKeyAdmin.get_queryset

        def purged(admin: Any, request: Any) -> Any:
            rows = shown(admin, request)
            if made in rows:  # it has been found for the page
                return rows
            return rows.none()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(IdempotencyKeyAdmin, "get_queryset", purged)
            found = IdempotencyKeyAdmin.get_object

            def vanish(admin: Any, *args: Any) -> Any:
                row = found(admin, *args)
                IdempotencyKey.objects.using(alias).all().delete()
                return row

            patch.setattr(IdempotencyKeyAdmin, "get_object", vanish)
            assert "No response is stored." in page(operator, detail(made))


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

    def test_buttons(self, auditor: Client) -> None:
        """Without the permission to delete there is no button, and its page is refused."""
        made = record()
        assert detail(made, "remove") not in page(auditor, detail(made))
        assert "remove_selected" not in page(auditor, LIST)
        assert auditor.get(detail(made, "remove")).status_code == 403
        assert auditor.post(detail(made, "remove")).status_code == 403
        assert IdempotencyKey.objects.count() == 1

    def test_never_as_django_deletes(self) -> None:
        """Django's own way would delete what is in use, and forget no cached response."""
        made = record()
        client = Client()
        client.force_login(User.objects.create_superuser("root"))
        assert client.post(detail(made, "delete"), {"post": "yes"}).status_code == 403
        assert "delete_selected" not in page(client, LIST)
        assert detail(made, "remove") in page(client, detail(made))

    @pytest.mark.parametrize("name", ["0", "nobody", "1,x", ","])
    def test_missing(self, operator: Client, name: str) -> None:
        """There is no page for a record that is not there."""
        assert operator.get(f"{LIST}{name}/remove/").status_code == 404


def act(client: Client, chosen: list[IdempotencyKey], *, sure: bool = False) -> HttpResponse:
    """Choose to delete some rows of the list."""
    selected = {"action": "remove_selected", "_selected_action": [made.pk for made in chosen]}
    asked = client.post(LIST, selected, follow=True)
    return client.post(asked.redirect_chain[-1][0], follow=True) if sure else asked


def claimed(alias: str, operation: Operation) -> Claim | None:
    """What a request with this operation would get: a claim, or none."""
    store = DatabaseStore("default", using=alias)
    with store.transaction():
        found = store.acquire(operation)
    return found if isinstance(found, Claim) else None


class TestDeleting:
    """Deleting."""

    def test_delete(self, alias: str, operator: Client) -> None:
        """What is deleted after asking is gone, nothing else is, and a retry runs anew."""
        traits: list[dict[str, bool]] = [
            {},
            *({name: True} for name in ("failed", "expired", "interrupted", "held")),
        ]
        operation = an_operation(key="the-key")
        chosen = [record(alias, **trait) for trait in traits]
        chosen.append(record(alias, key=operation.key, scope=operation.scope))
        other = record(alias)
        for made in (*chosen, other):
            step(made)
        assert claimed(alias, operation) is None
        asked = act(operator, chosen)
        assert asked.content.decode().count('<th scope="row">') == 6
        assert ">held</span>" in asked.content.decode()
        assert "The next request with such a key is executed" in asked.content.decode()
        assert IdempotencyKey.objects.using(alias).count() == 7
        done = act(operator, chosen, sure=True)
        assert messages(done) == ["6 idempotency keys: deleted."]
        assert done.redirect_chain[-1][0] == LIST
        assert IdempotencyKey.objects.using(alias).get() == other
        assert IdempotencyStep.objects.using(alias).get().record_id == other.pk
        assert claimed(alias, operation) is not None

    def test_recalled_no_more(self, alias: str, operator: Client, forgotten: list[Any]) -> None:
        """Stores that recall responses forget each record, before anybody sees it changed."""
        chosen = [record(alias, key="a"), record(alias, key="b"), record(alias, in_progress=True)]
        record(alias, key="c")
        act(operator, chosen)
        assert forgotten == []
        act(operator, chosen, sure=True)
        assert sorted(forgotten) == [(key, chosen[0].scope, "uncommitted") for key in "ab"]

    def test_logged(self, operator: Client) -> None:
        """Who did it to which record is logged, with nothing of the response."""
        chosen = records(2)
        act(operator, chosen)
        assert not LogEntry.objects.exists()
        act(operator, chosen, sure=True)
        entries = LogEntry.objects.order_by("object_id")
        assert {entry.object_id for entry in entries} == {str(made.pk) for made in chosen}
        for entry in entries:
            assert entry.action_flag == DELETION
            assert entry.user_id == int(operator.session["_auth_user_id"])
            assert entry.get_change_message().startswith("Deleted;")
            assert "example.org" not in entry.object_repr + entry.change_message

    def test_one_record(self, alias: str, operator: Client) -> None:
        """It can be done from the page of a record, too."""
        made, other = record(alias), record(alias)
        said = page(operator, detail(made, "remove"))
        assert made.key in said
        assert other.key not in said
        done = operator.post(detail(made, "remove"))
        assert (done.status_code, done.headers["Location"]) == (302, LIST)
        assert IdempotencyKey.objects.using(alias).get() == other

    def test_what_is_left_alone(self, alias: str, operator: Client) -> None:
        """What is in progress is named before, and left alone if it is sent all the same."""
        made = record(alias, in_progress=True)
        before = IdempotencyKey.objects.using(alias).values().get()
        reason = "A key in progress can be deleted only after"
        asked = act(operator, [made]).content.decode()
        assert reason in asked
        assert 'type="submit" value="Yes' not in asked
        [said] = messages(act(operator, [made], sure=True))
        assert said.startswith(f"Left unchanged: {made}. {reason}")
        assert IdempotencyKey.objects.using(alias).values().get() == before
        assert not LogEntry.objects.exists()

    def test_in_use(self, alias: str, operator: Client) -> None:
        """A record that a request holds at this moment is neither touched nor waited for."""
        if not connections[alias].features.has_select_for_update_skip_locked:
            pytest.skip("SQLite has no locks on rows")
        chosen = [record(alias, key="held"), record(alias, key="free")]
        with held(alias, "held"):
            done = act(operator, chosen, sure=True)
        in_use = "It is in use now, or was deleted. Try again later."
        assert messages(done)[1] == f"Left unchanged: {chosen[0]}. {in_use}"
        assert LogEntry.objects.get().object_repr.startswith("free ")
        assert IdempotencyKey.objects.using(alias).get().key == "held"

    def test_too_many(self, alias: str, operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who selects all of a big table is stopped before anything is read or logged."""
        monkeypatch.setattr(base, "MOST", 2)
        chosen = [made.pk for made in records(3, alias)]
        for across in ("0", "1"):
            data = {"_selected_action": chosen, "select_across": across}
            done = operator.post(LIST, {"action": "remove_selected", **data}, follow=True)
            assert messages(done) == ["Select at most 2 idempotency keys for this action."]
        assert IdempotencyKey.objects.using(alias).count() == 3

    def test_address_of_many(self) -> None:
        """The address of a page of as many rows as are taken fits into what servers accept."""
        page = site.get_model_admin(IdempotencyKey)
        keys = range(9_999_999_999 - base.MOST, 9_999_999_999)
        assert len(page.address("remove", *keys)) < 4_000  # type: ignore[attr-defined]

    def test_log_and_deed_go_together(
        self, alias: str, operator: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What cannot be logged is not done."""
        made = record(alias)

        def fail(*args: Any, **options: Any) -> None:
            raise RuntimeError("the log is full")

        monkeypatch.setattr(type(LogEntry.objects), "log_actions", fail)
        with pytest.raises(RuntimeError, match="full"):
            act(operator, [made], sure=True)
        assert IdempotencyKey.objects.using(alias).count() == 1


NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)


class TestTimeline:
    """Moments, told against the database's clock."""

    @pytest.mark.parametrize(
        ("at", "age", "ahead"),
        [
            (None, "never", True),
            (NOW, "now", False),
            (NOW + timedelta(seconds=59), "now", True),
            (NOW - timedelta(seconds=61), "1\xa0minute\xa0ago", False),
            (NOW + timedelta(hours=25), "in\xa01\xa0day", True),
        ],
    )
    def test_age(self, at: datetime | None, age: str, ahead: bool) -> None:
        """An age has one unit; what is less than a minute away is now."""
        event = Moment(at, NOW)
        assert (event.age, event.ahead) == (age, ahead)

    def test_exactly(self) -> None:
        """The exact moment has seconds and a time zone, where the project has time zones."""
        with timezone.override("Europe/Berlin"):
            assert Moment(NOW, NOW).exactly == "2030-01-01 13:00:00.000 CET"
        assert Moment(NOW.replace(tzinfo=None), NOW).exactly == "2030-01-01 12:00:00.000"
        assert Moment(None, NOW).exactly == ""

    @pytest.mark.parametrize(
        ("traits", "told"),
        [
            ({}, ["created", "completed", "expires", "may be purged"]),
            ({"permanent": True}, ["created", "completed", "expires"]),
            ({"failed": True}, ["created", "failed", "may be purged"]),
            (
                {"in_progress": True, "lease_expires_at": NOW + timedelta(seconds=30)},
                ["created", "lease ends", "expires", "may be purged"],
            ),
            (
                {"in_progress": True, "lease_expires_at": NOW, "attempt": 2},
                ["attempt 2 began", "lease ended", "expires", "may be purged"],
            ),
            (  # which no purge deletes
                {"in_progress": True, "lease_expires_at": NOW, "hold": True},
                ["created", "lease ended", "expires"],
            ),
            (
                {"attempt": 2, "last_replayed_at": NOW + timedelta(hours=1), "replay_count": 1},
                ["attempt 2 began", "completed", "replayed", "expires", "may be purged"],
            ),
        ],
    )
    def test_events(self, traits: dict[str, Any], told: list[str]) -> None:
        """A record's life is told in order, for as much of it as there is."""
        made: Any = IdempotencyKeyFactory.build(created_at=NOW, **traits)
        made.now = NOW
        life = Member(kind="record", reference="k s", title="", row=made)
        entries = sorted(
            Records("default").moments(life), key=lambda each: (each.at is None, each.at or NOW)
        )
        assert [entry.what for entry in entries] == told


def test_registered() -> None:
    """The admin finds the records without a line in the project."""
    assert isinstance(site._registry[IdempotencyKey], IdempotencyKeyAdmin)
