"""The outbox in the admin: who sees what, and what an operator does about poison."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext

from idempotency_django.contrib.messaging import Relay
from idempotency_django.contrib.messaging.databases import database
from idempotency_django.contrib.messaging.models import OutboxMessage
from tests.support.admin_pages import act, ask, member, page

from .conftest import outbox
from .test_relay import got, make_due, publish_each, refuse, states

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.usefixtures("broker"),
]
LIST = "/admin/idempotency_messaging/outboxmessage/"
VIEW = "view_outboxmessage"
SETTLE = "settle_outbox"
PAYLOAD = "view_outbox_payload"


@pytest.fixture(autouse=True)
def limited(broker: object) -> Iterator[None]:
    """One attempt, on each of the databases."""
    with outbox(orders={"MAX_ATTEMPTS": 1}):
        yield


def do(client: Client, action: str, *payloads: int) -> Any:
    """Select messages by their data, and do it to them."""
    rows = OutboxMessage.objects.using(database()).filter(payload__in=[str(p) for p in payloads])
    return act(client, action, *rows, path=LIST)


def dead(using: str) -> None:
    """1 is dead, and 2 waits for it."""
    publish_each([1, 2], using, group="g")
    refuse(1)
    Relay().drain()
    refuse()
    make_due(using)
    assert Relay().drain() == 0


def test_retry(using: str) -> None:
    """A dead message that is retried is sent under its id, and its group follows in order."""
    dead(using)
    response = do(member(VIEW, SETTLE), "retry", 1, 2)
    assert "1 outbox message: sent soon." in response.content.decode()
    Relay().drain()
    assert got() == [1, 2]


def test_buttons(using: str) -> None:
    """The page of a dead letter has the buttons; each asks, and is logged."""
    dead(using)
    settler = member(VIEW, SETTLE)
    message, other = OutboxMessage.objects.using(using).order_by("sequence")
    detail = page(settler, f"{LIST}{message.pk}/change/")
    button = re.compile('name="action" value="(retry|discard|resend)"')
    assert button.findall(detail) == ["retry", "discard"]
    assert not button.findall(page(member(VIEW), f"{LIST}{message.pk}/change/"))
    asked = ask(settler, "discard", message, path=LIST).content
    assert b"never sent, and its group continues" in asked
    assert states(using) == {1: "dead", 2: "pending"}
    assert b"Left unchanged: 1. " in act(settler, "discard", other, path=LIST).content
    act(member(VIEW), "discard", message, path=LIST)
    assert states(using) == {1: "dead", 2: "pending"}
    response = act(settler, "discard", message, path=LIST)
    assert "1 outbox message: discarded." in response.content.decode()
    assert states(using) == {1: "discarded", 2: "pending"}
    assert LogEntry.objects.get().change_message == "Discarded; its group continues without it."
    again = act(settler, "discard", message, path=LIST).content.decode()
    assert "so this action no longer applies" in again


def test_list(using: str) -> None:
    """The list filters by state and topic, and finds an id and a group; it does not read all rows
    to know the topics. A dead letter stands out.
    """
    dead(using)
    publish_each([3], using, group="other")
    first, second, other = OutboxMessage.objects.using(using).order_by("pk")
    with outbox(bills={"BACKEND": "local"}), CaptureQueriesContext(connections[using]) as queries:
        shown = page(member(VIEW), LIST)
    assert not [query for query in queries if "DISTINCT" in query["sql"]]
    assert "?topic=bills" in shown
    assert '<span class="idempotency-dead">dead</span>' in shown

    def found(**asked: str) -> list[bool]:
        listed = page(member(VIEW), LIST, **asked)
        return [f"/{row.pk}/change/" in listed for row in (first, second, other)]

    assert found(topic="orders") == [True, True, True]
    assert found(topic="bills") == [False, False, False]
    assert found(state__exact="dead") == [True, False, False]
    assert found(q=other.message_id) == [False, False, True]
    assert found(q="orders/g") == [True, True, False]
    assert found(q="orders/o") == [False, False, False]


def test_resend(using: str, broker: Any) -> None:
    """What is sent again has a new id, although its dedup id is kept, and the next number."""
    publish_each([1, 1], using, group="g", dedup_id="d")
    Relay().drain()
    assert got() == [1]
    do(member(VIEW, SETTLE), "resend", 1)
    Relay().drain()
    assert got() == [1, 1]
    assert [message.extensions["sequence"] for message in broker.got] == [1, 2]
    assert len({message.id for message in broker.got}) == 2


def test_permissions(using: str) -> None:
    """Payloads and actions are for those who may; lists show neither."""
    publish_each([4711], using)
    message = OutboxMessage.objects.using(using).get()
    plain, privileged = member(VIEW), member(VIEW, PAYLOAD)
    assert "4711" not in page(plain, f"{LIST}{message.pk}/change/")
    assert "4711" in page(privileged, f"{LIST}{message.pk}/change/")
    sections = re.compile(r">(State|Content)</h2>")
    assert sections.findall(page(plain, f"{LIST}{message.pk}/change/")) == ["State"]
    assert sections.findall(page(privileged, f"{LIST}{message.pk}/change/")) == ["State", "Content"]
    assert "4711" not in page(privileged, LIST)
    assert 'value="retry"' not in page(plain, LIST)
    assert plain.get(LIST, {"payload__startswith": "4"}).status_code == 400
    do(plain, "resend", 4711)
    assert OutboxMessage.objects.using(using).count() == 1
