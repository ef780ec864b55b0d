"""The inbox in the admin: who sees what, and what an operator does to a message."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext, override_settings

from idempotency_django.contrib.messaging import process_due
from tests.stores.test_purge import held
from tests.support.admin_pages import act, ask, member, messages, page

from .conftest import Inbox
from .receivers import GitHubHook, Hook, behaviour, body_of, deliver
from .test_processing import dead_letter, fail

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

LIST = "/admin/idempotency_messaging/inboxmessage/"


@pytest.fixture(autouse=True)
def _with_admin(alias: str) -> Any:
    with override_settings(ROOT_URLCONF="tests.contrib.messaging.webhooks.with_admin"):
        yield


@pytest.fixture
def settler() -> Client:
    """Somebody who may look at messages and settle them, and sees no bodies."""
    return member("view_inboxmessage", "settle_message")


def detail(inbox: Inbox, message_id: str = "m-1", view: str = "change") -> str:
    return f"{LIST}{inbox.row(message_id).pk}/{view}/"


def test_list(inbox: Inbox, settler: Client) -> None:
    """The list shows, filters and finds messages, and reads no body."""
    deliver(Hook, "m-1", body_of(secret="s3cret"))
    deliver(GitHubHook, "x" * 300, headers={"X-GitHub-Event": "push"})
    with CaptureQueriesContext(connections[inbox.alias]) as queries:
        assert "m-1" in page(settler, LIST)
    selects = [query["sql"] for query in queries if "inboxmessage" in query["sql"]]
    assert selects
    assert not [sql for sql in selects if '"body"' in sql or "`body`" in sql]
    assert "m-1" in page(settler, LIST, q="m-")
    assert "m-1" not in page(settler, LIST, q="-1")
    assert "m-1" not in page(settler, LIST, source="github")
    assert "m-1" in page(settler, LIST, source="shop", state__exact="pending")
    assert "m-1" not in page(settler, LIST, state__exact="dead")
    assert settler.get(LIST, {"body__contains": "s3cret"}).status_code in (302, 400)


def test_bodies(inbox: Inbox, settler: Client) -> None:
    """Body, headers and error are for holders of the permission, as text and never as HTML."""
    behaviour["shop"] = fail
    deliver(Hook, "m-1", body_of(html_of="<script>"), headers={"X-Private": "p-17"})
    process_due()
    for text in ("html_of", "p-17", "warehouse"):
        assert text not in page(settler, detail(inbox))
    reader = member("view_inboxmessage", "view_body")
    raw = reader.get(detail(inbox)).content.decode()
    assert "&lt;script&gt;" in raw
    assert "p-17" in raw
    assert "The warehouse does not respond." in raw
    inbox.rows().update(body=b"\xff\x00")
    assert "\\xff" in page(reader, detail(inbox))


def test_not_allowed(inbox: Inbox) -> None:
    """Who may only look has no buttons and no actions; nobody adds, changes or deletes."""
    deliver(Hook)
    process_due()
    reader = member("view_inboxmessage", "delete_inboxmessage", "change_inboxmessage")
    assert "Reprocess" not in page(reader, detail(inbox))
    act(reader, "reprocess", inbox.row(), path=LIST)
    assert reader.post(detail(inbox, view="delete"), {"post": "yes"}).status_code == 403
    blind = member("settle_message")
    assert act(blind, "reprocess", inbox.row(), path=LIST).status_code == 403
    assert inbox.states() == ["done"]


def test_retry(inbox: Inbox, settler: Client) -> None:
    """A dead letter is retried by a button, after a question, and that is logged."""
    dead_letter(inbox)
    assert 'name="action" value="retry"' in page(settler, detail(inbox))
    asked = ask(settler, "retry", inbox.row(), path=LIST).content.decode()
    assert "Stored steps don&#x27;t run again" in asked
    assert inbox.states() == ["dead"]
    response = act(settler, "retry", inbox.row(), path=LIST)
    assert messages(response) == ["1 inbox message: handled again soon."]
    assert process_due() == {"done": 1}
    [entry] = LogEntry.objects.all()
    assert (entry.change_message, entry.object_id) == ("Retried.", str(inbox.row().pk))


def test_in_use(inbox: Inbox, settler: Client) -> None:
    """A message that a transaction holds at this moment is neither settled nor waited for."""
    if not connections[inbox.alias].features.has_select_for_update_skip_locked:
        pytest.skip("SQLite has no locks on rows")
    dead_letter(inbox)
    row = inbox.row()
    with held(inbox.alias, "", inbox.rows()):
        response = act(settler, "retry", row, path=LIST)
    assert messages(response) == [
        "Left unchanged: 1. The message is being handled or sent now. Try again later."
    ]
    assert inbox.states() == ["dead"]


def test_reprocess_selected(inbox: Inbox, settler: Client) -> None:
    """Selected messages are reprocessed together; what is in another state is left alone."""
    for number in range(2):
        deliver(Hook, f"m-{number}")
    process_due()
    deliver(Hook, "m-2")
    question = ask(settler, "reprocess", *inbox.rows(), path=LIST)
    assert b"writes them a second time" in question.content
    response = act(settler, "reprocess", *inbox.rows(), path=LIST)
    assert messages(response) == [
        "2 inbox messages: handled again soon.",
        (
            "Left unchanged: 1. The state of the message is now “pending”, so this action no "
            "longer applies. Reload it."
        ),
    ]
    process_due()
    assert sorted(inbox.effects()) == ["shop m-0", "shop m-0", "shop m-1", "shop m-1", "shop m-2"]
