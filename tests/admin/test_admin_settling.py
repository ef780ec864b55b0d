"""Settling what was interrupted, in the admin: completing it by hand, or releasing it."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.contrib.admin.models import CHANGE, LogEntry
from django.db import connections
from django.http import HttpResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext, override_settings
from django.utils import timezone

from idempotency_django.errors import ClaimLost
from idempotency_django.models import IdempotencyKey, IdempotencyStep
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import Claim, Status, Step
from idempotency_django.testing import RESPONSE, an_operation, eventually
from idempotency_django.testing.contract import as_claim, as_record
from tests.stores.test_purge import held
from tests.support.admin_pages import (
    LIST,
    act,
    alias,
    ask,
    detail,
    forgotten,
    member,
    messages,
    page,
)
from tests.support.factories import ago, record, records, step

__all__ = ["alias", "forgotten"]  # fixtures

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

WAYS = ["complete", "release"]
SETTLE = "settle"
BUTTON = 'name="action" value="settle"'
LEASE = timedelta(milliseconds=1)


@pytest.fixture
def settler() -> Client:
    """Somebody who may look at records and settle them, and sees no responses."""
    return member("view_idempotencykey", "settle")


def settlement(way: str, **changed: Any) -> dict[str, Any]:
    """What an operator sends for a record."""
    return {
        "outcome": way,
        "status": 201,
        "body": '{"id": 17}',
        "reason": "The provider has charge 17.",
        **changed,
    }


def settle(client: Client, made: IdempotencyKey, way: str, **changed: Any) -> HttpResponse:
    """Settle a record; the page that is shown then."""
    return act(client, SETTLE, made, **settlement(way, **changed))


def interrupted(alias: str, *, hold: bool = True, **changes: Any) -> tuple[DatabaseStore, Claim]:
    """The claim of an owner that made a step and has not been heard of since."""
    store = DatabaseStore("default", using=alias)
    operation = an_operation(lease=LEASE, hold=hold, **changes)
    claim = as_claim(store.acquire(operation))
    with store.durable("A step"):
        assert store.save_step(claim, Step(name="debit", attempt=1, result="17"))
    eventually(lambda: row(alias, interrupted=True))
    return store, claim


def row(alias: str, *, interrupted: bool = False) -> Any:
    """The only record."""
    rows: Any = IdempotencyKey.objects.using(alias)
    return (rows.interrupted() if interrupted else rows).first()


def state(alias: str) -> list[Any]:
    """All that is known of records and steps."""
    return [
        list(model.objects.using(alias).order_by("pk").values())
        for model in (IdempotencyKey, IdempotencyStep)
    ]


class TestCompleting:
    """Completing by hand."""

    @pytest.mark.parametrize("hold", [True, False])
    def test_response(self, alias: str, settler: Client, hold: bool) -> None:
        """A retry gets the response that was given by hand, and nothing is executed."""
        store, claim = interrupted(alias, hold=hold)
        found = row(alias)
        body = '{\r\n "name": "Zoë 🎈 <b>",\r\n "amount": 10.5\r\n}\r\n'
        done = settle(settler, found, "complete", body=body)
        assert messages(done) == ["1 idempotency key: settled."]
        assert done.redirect_chain == [(LIST, 302)]
        retried = as_record(store.acquire(claim.operation))
        assert retried.status is Status.COMPLETED
        assert retried.payload.status == 201
        assert retried.payload.headers == (("Content-Type", "application/json"),)
        assert json.loads(retried.payload.body) == json.loads(body)
        after = row(alias)
        assert abs(after.completed_at - timezone.now()) < timedelta(minutes=1)
        assert (after.lease_expires_at, after.expires_at) == (None, found.expires_at)
        assert (after.attempt, after.purge_at) == (1, found.purge_at)
        assert after.error == ""
        assert after.owner_token == claim.origin != claim.token
        assert IdempotencyStep.objects.using(alias).get().name == "debit"

    def test_late_owner(self, alias: str, settler: Client) -> None:
        """An owner that comes back can write nothing any more, and no transaction either."""
        store, claim = interrupted(alias)
        settle(settler, row(alias), "complete")
        before = state(alias)
        assert not store.complete(claim, RESPONSE)
        assert not store.fail(claim, "late")
        assert not store.extend(claim, 60)
        with pytest.raises(ClaimLost), store.fenced(claim):
            pass
        late = Step(name="credit", attempt=1, result="1")
        with suppress(ClaimLost), store.durable("A step"):
            store.save_step(claim, late)
        assert state(alias) == before

    def test_after_its_time_to_live(self, alias: str, settler: Client) -> None:
        """A response that would never be given is refused."""
        made = record(alias, held=True, created_at=ago(days=2))
        step(made)
        before = state(alias)
        refusal = "so a retry would execute the operation again and not get this response."
        [said] = messages(settle(settler, made, "complete"))
        assert said.startswith("Left unchanged: 1. Its time to live has ended, ")
        assert refusal in said
        assert state(alias) == before
        assert not LogEntry.objects.exists()

    @pytest.mark.parametrize(
        ("given", "error"),
        [
            ({"status": 199}, "greater than or equal to 200"),
            ({"status": 500}, "less than or equal to 499"),
            ({"reason": "  \n"}, "This field is required."),
            ({"body": '{"id": 17'}, "Enter a valid JSON."),
            ({"status": 204}, "A response with this status has no body."),
        ],
    )
    def test_what_is_no_response(self, settler: Client, given: dict[str, Any], error: str) -> None:
        """A mistake is explained beside what was entered, and nothing is done."""
        made = record(held=True)
        before = state("default")
        said = settle(settler, made, "complete", **given)
        assert error in said.content.decode().replace("&#x27;", "'")
        assert "The provider has charge 17." in said.content.decode() or "reason" in given
        assert state("default") == before
        assert not LogEntry.objects.exists()

    @pytest.mark.parametrize(
        ("given", "headers", "body"),
        [
            ({"status": 204, "body": ""}, [], b""),
            ({"body": "[]"}, [["Content-Type", "application/json"]], b"[]"),
        ],
    )
    def test_headers(
        self, settler: Client, given: dict[str, Any], headers: list[Any], body: bytes
    ) -> None:
        """The content type is the only header, and an empty body has none."""
        made = record(held=True)
        settle(settler, made, "complete", **given)
        after = row("default")
        assert json.loads(after.response_headers) == headers
        assert bytes(after.response_body) == body


@pytest.mark.parametrize("hold", [True, False])
def test_released(alias: str, settler: Client, hold: bool) -> None:
    """The next retry executes the operation, from behind its last step."""
    store, late = interrupted(alias, hold=hold)
    found = row(alias)
    done = settle(settler, found, "release", reason="Not charged: <b>sure</b>")
    assert messages(done) == ["1 idempotency key: settled."]
    after = row(alias)
    assert (after.status, after.lease_expires_at) == (Status.FAILED, None)
    assert after.owner_token == late.origin != late.token
    by = LogEntry.objects.get().user.get_username()
    assert after.error == f"Released by {by}: Not charged: <b>sure</b>"
    assert abs(after.completed_at - timezone.now()) < timedelta(minutes=1)
    assert not store.complete(late, RESPONSE)
    assert not store.extend(late, 60)
    claim = as_claim(store.acquire(late.operation))
    assert claim.attempt == 2
    assert [kept.name for kept in store.steps(claim)] == ["debit"]
    assert not store.complete(late, RESPONSE)


class TestBothWays:
    """What completing and releasing have in common."""

    @pytest.mark.parametrize("way", WAYS)
    def test_asked_before(self, alias: str, settler: Client, way: str) -> None:
        """The page says what follows; looking at it changes nothing."""
        made = record(alias, held=True, key="<i>k", attempt=3)
        before = state(alias)
        assert BUTTON in page(settler, detail(made))
        raw = ask(settler, SETTLE, made).content.decode()
        assert "What happens then" in raw
        assert "can no longer complete" in raw
        assert "&lt;i&gt;k" in raw
        assert "<i>k" not in raw
        ask(settler, SETTLE, made, **settlement(way))
        assert state(alias) == before
        assert not LogEntry.objects.exists()

    @pytest.mark.parametrize(
        ("way", "said"),
        [
            ("complete", "Completed by hand with status 201: The provider"),
            ("release", "Released for retry: The provider has charge 17."),
        ],
    )
    def test_logged(self, alias: str, settler: Client, way: str, said: str) -> None:
        """Who did what, and why, is in the log and in the record's history."""
        made = record(alias, held=True)
        settle(settler, made, way)
        entry = LogEntry.objects.get()
        assert (entry.object_id, entry.action_flag) == (str(made.pk), CHANGE)
        assert entry.user_id == int(settler.session["_auth_user_id"])
        assert entry.get_change_message().startswith(said)
        history = page(settler, detail(made, "history"))
        assert said in history
        assert entry.user.get_username() in history

    @pytest.mark.parametrize("way", WAYS)
    def test_only_with_the_log(
        self, alias: str, settler: Client, monkeypatch: pytest.MonkeyPatch, way: str
    ) -> None:
        """What cannot be logged is not done."""
        made = record(alias, held=True)
        before = state(alias)

        def fail(*args: Any, **options: Any) -> None:
            raise RuntimeError("the log is full")

        monkeypatch.setattr(type(LogEntry.objects), "log_actions", fail)
        with pytest.raises(RuntimeError, match="full"):
            settle(settler, made, way)
        assert state(alias) == before

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(
        "permissions",
        [["view_idempotencykey", "view_response", "delete_idempotencykey"], ["settle"]],
    )
    def test_permission(self, alias: str, way: str, permissions: list[str]) -> None:
        """It takes the permission to settle, and the one to look at the record."""
        made = record(alias, held=True)
        before = state(alias)
        client = member(*permissions)
        if "settle" not in permissions:
            assert BUTTON not in page(client, detail(made))
        settle(client, made, way)
        assert state(alias) == before

    def test_across(self, alias: str, settler: Client) -> None:
        """All that the filters find are settled, however many the list shows, and no others."""
        chosen, other = records(60, alias, held=True), record(alias, interrupted=True)
        path = f"{LIST}?state=held"
        asked = ask(settler, SETTLE, chosen[0], path=path, select_across="1")
        assert b"60 idempotency keys. This is done to all rows that the list" in asked.content
        sent = settlement("release", select_across="1")
        done = act(settler, SETTLE, chosen[0], path=path, **sent)
        assert messages(done) == ["60 idempotency keys: settled."]
        left: Any = IdempotencyKey.objects.using(alias)
        assert left.interrupted().get() == other
        assert LogEntry.objects.count() == 60

    @pytest.mark.parametrize(
        ("traits", "state_said"),
        [
            ({}, "completed"),
            ({"failed": True}, "failed"),
            ({"in_progress": True, "hold": True}, "in progress"),
        ],
    )
    @pytest.mark.parametrize("way", WAYS)
    def test_only_what_was_interrupted(
        self, alias: str, settler: Client, way: str, traits: dict[str, bool], state_said: str
    ) -> None:
        """Nothing else is offered, or done if it is sent all the same."""
        made = record(alias, **traits)
        before = state(alias)
        assert BUTTON not in page(settler, detail(made))
        because = f"Only an interrupted record can be settled; this one is {state_said}."
        told = messages(settle(settler, made, way))
        assert told == [f"Left unchanged: 1. {because}"]
        assert state(alias) == before
        assert not LogEntry.objects.exists()

    @pytest.mark.parametrize("way", WAYS)
    def test_in_use(self, alias: str, settler: Client, way: str) -> None:
        """What a transaction holds at this moment is neither settled nor waited for."""
        if not connections[alias].features.has_select_for_update_skip_locked:
            pytest.skip("SQLite has no locks on rows")
        made = record(alias, held=True, key="held")
        before = state(alias)
        with held(alias, "held"):
            told = messages(settle(settler, made, way))
        in_use = "It is in use now, or was deleted. Try again later."
        assert told == [f"Left unchanged: 1. {in_use}"]
        assert state(alias) == before

    @pytest.mark.parametrize("way", WAYS)
    def test_recalled_no_more(
        self, alias: str, settler: Client, forgotten: list[Any], way: str
    ) -> None:
        """Stores that recall responses forget the record, before anybody sees it changed."""
        made = record(alias, held=True)
        ask(settler, SETTLE, made)
        settle(settler, made, way, reason="")
        assert forgotten == []
        settle(settler, made, way)
        assert forgotten == [(made.key, made.scope, "uncommitted")]

    @pytest.mark.parametrize("way", WAYS)
    def test_no_secret_is_asked_for(self, alias: str, settler: Client, way: str) -> None:
        """Settling takes no look at responses, errors, results or the owner's token."""
        made = record(alias, held=True)
        step(made)
        with CaptureQueriesContext(connections[alias]) as queries:
            ask(settler, SETTLE, made)
            settle(settler, made, way)
        asked = [query["sql"] for query in queries if query["sql"].startswith("SELECT")]
        names = connections[alias].ops.quote_name
        for column in ("response_headers", "error", "owner_token", "result"):
            assert not [sql for sql in asked if names(column) in sql], column


@pytest.mark.skipif(len(settings.ALIASES) < 2, reason="takes two databases")
def test_log_in_another_database(settler: Client) -> None:
    """The log is where the project's is, even if the records are elsewhere."""
    *_, other = settings.ALIASES.values()
    store = {
        "BACKEND": "idempotency_django.stores.database.DatabaseStore",
        "OPTIONS": {"using": other},
    }
    with override_settings(IDEMPOTENCY={"STORES": {"default": store}}):
        settle(settler, record(other, held=True), "release")
    assert row(other).status == Status.FAILED
    assert LogEntry.objects.using("default").count() == 1
