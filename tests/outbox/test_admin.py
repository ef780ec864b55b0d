"""The outbox in the admin: who sees what, and what an operator does about poison."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client, override_settings

from idempotency_django.messaging.models import OutboxMessage
from idempotency_django.messaging.outbox.relay import Relay
from tests.admin_pages import member, page

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
    orders = {"BACKEND": "tests.outbox.conftest.Broker", "MAX_ATTEMPTS": 1}
    with override_settings(IDEMPOTENCY={"OUTBOX": {"orders": orders}, "MESSAGING_DATABASE": using}):
        yield


def do(client: Client, action: str, *payloads: int) -> Any:
    """Select messages by their data, and do it to them."""
    rows = OutboxMessage.objects.using(_using()).filter(payload__in=[str(p) for p in payloads])
    chosen = [str(pk) for pk in rows.values_list("pk", flat=True)]
    return client.post(LIST, {"action": action, "_selected_action": chosen}, follow=True)


def _using() -> str:
    from idempotency_django.messaging.databases import database

    return database()


def blocked(using: str) -> None:
    """1 is blocked, and 2 waits for it."""
    publish_each([1, 2], using, group="g")
    refuse(1)
    Relay().drain()
    refuse()
    make_due(using)
    assert Relay().drain() == 0


def test_retry(using: str) -> None:
    """A blocked message that is retried is sent under its id, and its group follows in order."""
    blocked(using)
    response = do(member(VIEW, SETTLE), "retry_selected", 1, 2)
    assert "1 message was changed." in response.content.decode()
    Relay().drain()
    assert got() == [1, 2]
    assert LogEntry.objects.count() == 1


def test_skip(using: str) -> None:
    """A blocked message that is skipped is never sent, and its group goes on."""
    blocked(using)
    do(member(VIEW, SETTLE), "skip_selected", 1)
    Relay().drain()
    assert got() == [2]
    assert states(using) == {1: "skipped", 2: "sent"}


def test_resend(using: str, broker: Any) -> None:
    """What is sent again, within the window, too, has a new id, and the group's next number."""
    publish_each([1, 1], using, group="g", dedup_id="d")
    Relay().drain()
    assert got() == [1]
    do(member(VIEW, SETTLE), "resend_selected", 1)
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
    assert "retry_selected" not in page(plain, LIST)
    assert plain.get(LIST, {"payload__startswith": "4"}).status_code == 400
    do(plain, "resend_selected", 4711)
    assert OutboxMessage.objects.using(using).count() == 1


def test_streams(using: str) -> None:
    """The list of groups says how much waits, and which are blocked."""
    blocked(using)
    text = page(
        member("view_outboxstream"),
        "/admin/idempotency_messaging/outboxstream/",
    )
    assert "orders/g" in text
    assert '<td class="field-waiting">2</td>' in text
    assert "icon-yes" in text
