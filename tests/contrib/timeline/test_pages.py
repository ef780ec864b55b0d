"""The admin's pages show the timeline of the chain, of each member what its own page would show."""

from __future__ import annotations

from html import unescape
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.admin import AdminSite
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.http import HttpRequest
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import path, reverse

from idempotency_django.admin import IdempotencyKeyAdmin
from idempotency_django.contrib.messaging.admin import InboxMessageAdmin, OutboxMessageAdmin
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.models import IdempotencyKey
from tests.contrib.timeline.messages import named, published, received
from tests.support.factories import StaffFactory, ago, copies, record, step

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.urls(__name__),
]


class OfTenants(IdempotencyKeyAdmin):
    """Shows to Bob what is Bob's."""

    def get_queryset(self, request: HttpRequest) -> Any:
        rows = super().get_queryset(request)
        return rows.filter(principal="user:bob") if request.user.username == "bob" else rows


site = AdminSite("traced")
site.register(IdempotencyKey, OfTenants)
site.register(OutboxMessage, OutboxMessageAdmin)
site.register(InboxMessage, InboxMessageAdmin)
urlpatterns = [path("admin/", site.urls)]


@pytest.fixture
def auditor() -> Client:
    """Somebody who may see records and messages, and no responses."""
    return member("view_idempotencykey", "view_outboxmessage", "view_inboxmessage")


def member(*permissions: str, **columns: Any) -> Client:
    """Somebody with these permissions."""
    user: User = StaffFactory(**columns)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def address(row: Any, view: str = "change") -> str:
    """The address of the page of a row."""
    name = f"admin:{row._meta.app_label}_{row._meta.model_name}_{view}"
    return reverse(name, args=[row.pk], current_app="traced")


def shown(client: Client, row: Any) -> tuple[str, str]:
    """What a page shows as the timeline, and as causes; as it is, with its entities."""
    response = client.get(address(row))
    assert response.status_code == 200
    page = response.content.decode()
    timeline = page.split('<ol class="idempotency-timeline">')[1].split("</fieldset>")[0]
    _, _, causes = page.partition('<ul class="idempotency-chain">')
    return timeline, causes.split("</fieldset>")[0]


@pytest.fixture
def chain() -> list[Any]:
    """A message from outside, what handled it, what that published, and what came of that."""
    received_one = received(received_at=ago(minutes=9), processed_at=ago(minutes=8))
    handled = record(
        operation="webhook stripe",
        key="handled",
        created_at=ago(minutes=7),
        caused_by=named(received_one),
        principal="user:bob",
    )
    message = published(
        message_id="m-1",
        caused_by=named(handled),
        created_at=ago(minutes=6),
        sent_at=ago(minutes=5),
    )
    booked = record(
        operation="billing order.paid",
        key="booked",
        created_at=ago(minutes=4),
        caused_by=named(message),
        principal="user:alice",
    )
    return [received_one, handled, message, booked]


def test_from_each_page(auditor: Client, chain: list[Any]) -> None:
    """Each page shows all that happened in the chain, in order, and links to the other pages."""
    titles = ["invoice.paid from stripe", "webhook stripe", "order.paid to orders"]
    titles.append("billing order.paid")
    for own, row in enumerate(chain):
        timeline, causes = shown(auditor, row)
        for place, (other, title) in enumerate(zip(chain, titles, strict=True)):
            link = f'<a href="{address(other)}">{title}</a>'
            assert (link in causes) is (place != own)
            assert (f"{link}: " in timeline) is (place != own)
        assert f'<strong aria-current="page">{titles[own]}</strong>' in causes
        places = [causes.index(title) for title in titles]
        assert places == sorted(places)
        assert [causes.count("<li>" + "\N{EM SPACE}" * each + "<") for each in range(4)] == [1] * 4
        moments = [item.split("</span>")[0] for item in timeline.split("<li")[1:]]
        assert moments == sorted(moments, key=lambda moment: moment.split("<span>")[1])


def test_only_what_one_may_see(chain: list[Any]) -> None:
    """Of a member whose page they may not open, a user learns only that it is there."""
    inbox, handled, message, booked = chain
    page = "".join(shown(member("view_outboxmessage"), message))
    assert "order.paid to orders" in page
    assert page.count("You don&#x27;t have permission to view it.") == 3
    for secret in ("webhook stripe", "handled", "booked", "invoice.paid", inbox.message_id):
        assert secret not in page
    whole = member("view_outboxmessage", username="vera").get(address(message)).text
    assert handled.scope not in whole
    page = "".join(shown(member("view_idempotencykey"), booked))
    assert page.count("You don&#x27;t have permission to view it.") == 2
    assert address(handled) in page
    assert "m-1" not in page
    assert member().get(address(booked)).status_code == 403


def test_what_is_somebody_elses(chain: list[Any]) -> None:
    """Where an admin shows a user some rows only, a timeline shows no other ones either."""
    _, handled, _, booked = chain
    bob = member("view_idempotencykey", "view_outboxmessage", username="bob")
    timeline, causes = shown(bob, handled)
    assert "m-1" in causes
    assert "booked" not in causes
    assert "billing order.paid" not in timeline + causes
    alice = member("view_idempotencykey", "view_outboxmessage", username="alice")
    assert address(booked) in shown(alice, handled)[1]


def test_confidential(auditor: Client, chain: list[Any]) -> None:
    """Results of steps are on their record's own page, for who sees responses."""
    handled = chain[1]
    step(handled, name="charge", result='{"card": "of alice"}')
    insider = member("view_idempotencykey", "view_response", "view_outboxmessage")
    for client, row, results in (
        (auditor, handled, False),
        (insider, handled, True),
        (insider, chain[2], False),
        (insider, chain[3], False),
    ):
        timeline, _ = shown(client, row)
        assert "tep charge, by attempt 1" in timeline
        assert ("of alice" in unescape(timeline)) is results


def test_many(auditor: Client) -> None:
    """A page with as many members as a timeline holds needs no more queries than a short one."""
    root = record(key="root")
    copies(9, record(caused_by=named(root)))
    shown(auditor, root)
    counts = []
    for more in (0, 1000):
        copies(more, record(caused_by=named(root)))
        with CaptureQueriesContext(connection) as queries:
            _, causes = shown(auditor, root)
        counts.append(len(queries))
    assert "Only 200 are listed." in causes
    assert counts[0] == counts[1]
    assert counts[0] <= 20


@pytest.mark.skipif(len(django_settings.ALIASES) < 2, reason="takes two databases")
def test_another_database(auditor: Client) -> None:
    """A record of another database has no page here: it is shown without a link."""
    other = list(django_settings.ALIASES.values())[1]
    backend = "idempotency_django.stores.database.DatabaseStore"
    two = {
        "default": {"BACKEND": backend},
        "other": {"BACKEND": backend, "OPTIONS": {"using": other}},
    }
    with override_settings(IDEMPOTENCY={"STORES": two}):
        root = record(key="root")
        record(other, key="there", operation="elsewhere", caused_by=named(root))
        timeline, causes = shown(auditor, root)
        assert "\N{EM SPACE}elsewhere <span" in causes
        assert "elsewhere: created" in timeline
