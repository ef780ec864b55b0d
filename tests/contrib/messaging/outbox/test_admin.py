"""The outbox in the admin: who sees what, and what an operator does about poison."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client, override_settings

from idempotency_django.contrib.messaging import Relay
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.models import DatabaseNow
from tests.support.admin_pages import act, ask, member, page

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
def limited(using: str, broker: object) -> Iterator[None]:
    """One attempt, on each of the databases."""
    orders = {"BACKEND": "tests.contrib.messaging.outbox.conftest.Broker", "MAX_ATTEMPTS": 1}
    with override_settings(IDEMPOTENCY={"OUTBOX": {"orders": orders}, "MESSAGING_DATABASE": using}):
        yield


def do(client: Client, action: str, *payloads: int) -> Any:
    """Select messages by their data, and do it to them."""
    rows = OutboxMessage.objects.using(_using()).filter(payload__in=[str(p) for p in payloads])
    return act(client, action, *rows, path=LIST)


def _using() -> str:
    from idempotency_django.contrib.messaging.databases import database

    return database()


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
    assert LogEntry.objects.count() == 1


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


def dead_ones(using: str, count: int, **columns: Any) -> list[int]:
    """Dead letters of the outbox."""
    first = OutboxMessage.objects.using(using).count()
    rows = [
        OutboxMessage(
            message_id=f"d-{first + at}",
            type="t",
            payload="1",
            state="dead",
            created_at=DatabaseNow(),
            **columns,
        )
        for at in range(count)
    ]
    OutboxMessage.objects.using(using).bulk_create(rows)
    return [*OutboxMessage.objects.using(using).filter(**columns).values_list("pk", flat=True)]


def test_all_that_the_filters_find(using: str) -> None:
    """All dead letters of a topic are settled at once, however many there are, and no others."""
    [pk, *_] = dead_ones(using, 1_200, topic="orders", error="ConnectionError: refused")
    dead_ones(using, 2, topic="mails", error="ConnectionError: refused")
    settler, rows = member(VIEW, SETTLE), OutboxMessage.objects.using(using)
    path = f"{LIST}?state__exact=dead&topic=orders"
    asked = ask(settler, "retry", pk, path=path, select_across="1").content
    assert b"all rows that the list" in asked
    assert rows.filter(state="dead").count() == 1_202
    act(settler, "retry", pk, path=path, select_across="1")
    assert rows.filter(state="pending", topic="orders", error="").count() == 1_200
    assert rows.filter(state="dead", topic="mails").count() == 2
    assert LogEntry.objects.count() == 1_200


def test_discard_of_a_topic_that_is_gone(using: str) -> None:
    """A message whose topic was removed is left alone, in words."""
    dead(using)
    with override_settings(IDEMPOTENCY={"MESSAGING_DATABASE": using}):
        response = do(member(VIEW, SETTLE), "discard", 1)
    assert "There is no topic &#x27;orders&#x27;" in response.content.decode()
    assert states(using) == {1: "dead", 2: "pending"}


def test_asked_first(using: str) -> None:
    """What is selected in the list is done after a question."""
    dead(using)
    response = ask(member(VIEW, SETTLE), "discard", _first(using), path=LIST)
    assert b"What happens then" in response.content
    assert states(using) == {1: "dead", 2: "pending"}


def _first(using: str) -> int:
    return OutboxMessage.objects.using(using).order_by("sequence")[0].pk


def test_discard(using: str) -> None:
    """A dead message that is discarded is never sent, and its group continues."""
    dead(using)
    do(member(VIEW, SETTLE), "discard", 1)
    Relay().drain()
    assert got() == [2]
    assert states(using) == {1: "discarded", 2: "done"}


def test_resend(using: str, broker: Any) -> None:
    """What is sent again has a new id, although its dedup id is kept, and the next number."""
    publish_each([1, 1], using, group="g", dedup_id="d")
    Relay().drain()
    assert got() == [1]
    do(member(VIEW, SETTLE), "resend", 1)
    Relay().drain()
    assert got() == [1, 1]
    assert [message.sequence for message in broker.got] == [1, 2]
    assert len({message.message_id for message in broker.got}) == 2


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
