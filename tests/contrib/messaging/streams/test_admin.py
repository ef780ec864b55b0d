"""Streams in the admin: everybody who may look sees them, and who may resets a position."""

from __future__ import annotations

from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import transaction
from django.http import HttpResponse
from django.test import Client, override_settings

from idempotency_django.contrib.messaging.errors import StreamFenced
from idempotency_django.contrib.messaging.models import StreamPosition
from idempotency_django.contrib.messaging.streams import (
    Accepted,
    Duplicate,
    Stream,
    accept,
    claim_stream,
)
from tests.settings import ALIASES
from tests.support.admin_pages import member
from tests.support.factories import StaffFactory

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

LIST = "/admin/idempotency_messaging/streamposition/"


@pytest.fixture(params=sorted(ALIASES))
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    """The alias of each database, in which messaging has its tables."""
    with override_settings(IDEMPOTENCY={"MESSAGING_DATABASE": ALIASES[request.param]}):
        yield ALIASES[request.param]


@pytest.fixture
def stream(using: str) -> Stream:
    claimed = claim_stream("billing/orders/0")
    with claimed.advance(to=41):
        pass
    return claimed


def row(using: str) -> StreamPosition:
    return StreamPosition.objects.using(using).get()


def reset(client: Client, using: str, **changes: Any) -> HttpResponse:
    found = row(using)
    given = {"position": 9, "reason": "Bad deploy", "epoch": found.epoch, "before": found.position}
    return client.post(f"{LIST}{found.pk}/reset/", given | changes, follow=True)


OPERATOR = ("view_streamposition", "reset_streamposition")


def test_read_only(stream: Stream, using: str) -> None:
    """The list and the page show the stream; nothing can be added, changed or deleted."""
    client, pk = member("view_streamposition"), row(using).pk
    for address in (LIST, f"{LIST}?q=billing", f"{LIST}{pk}/change/"):
        text = unescape(client.get(address).content.decode())
        assert "billing/orders/0" in text
        assert "41" in text
        assert "Reset" not in text
    assert "billing" not in client.get(f"{LIST}?q=orders").content.decode().split("results")[-1]
    superuser = Client()
    superuser.force_login(StaffFactory(is_superuser=True))
    for address in (f"{LIST}add/", f"{LIST}{pk}/delete/"):
        assert superuser.get(address).status_code == 403
    assert superuser.post(f"{LIST}{pk}/change/", {"position": 1}).status_code == 403


@pytest.mark.parametrize("permissions", [OPERATOR[:1], OPERATOR[1:]])
def test_permission(stream: Stream, using: str, permissions: tuple[str, ...]) -> None:
    """Resetting takes a permission of its own besides that to look."""
    assert reset(member(*permissions), using).status_code == 403
    assert row(using).position == 41


def test_reset(stream: Stream, using: str) -> None:
    """The operator is warned; then the owner is fenced, and the next one goes on there."""
    client, pk = member(*OPERATOR), row(using).pk
    assert f"{LIST}{pk}/reset/" in client.get(f"{LIST}{pk}/change/").content.decode()
    question = unescape(client.get(f"{LIST}{pk}/reset/").content.decode())
    assert "executed again when they are delivered again" in question
    assert "is fenced" in question
    assert row(using).position == 41
    assert reset(client, using).status_code == 200
    with pytest.raises(StreamFenced), stream.advance(to=42):
        pytest.fail("The block runs.")
    assert claim_stream("billing/orders/0").position == 9
    [entry] = LogEntry.objects.all()
    assert entry.change_message == "Reset from 41 to 9: Bad deploy"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"position": -2}, "greater than or equal to -1"),
        ({"position": 2**63}, "less than or equal to"),
        ({"reason": ""}, "required"),
        ({"before": 40}, "has changed since you opened this page"),
    ],
)
def test_refused(stream: Stream, using: str, wrong: dict[str, Any], text: str) -> None:
    """What is no position, has no reason, or is meant for an earlier state changes nothing."""
    response = reset(member(*OPERATOR), using, **wrong)
    assert text in unescape(response.content.decode())
    assert (row(using).epoch, row(using).position) == (1, 41)
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("number", ["4711", "x"])
def test_missing(using: str, number: str) -> None:
    """A stream that is not there has no page."""
    assert member(*OPERATOR).get(f"{LIST}{number}/reset/").status_code == 404


def test_peer(using: str) -> None:
    """A peer keeps its epoch, which it counts itself."""
    with transaction.atomic(using=using):
        accept("peer-7", epoch=3, sequence=0)
    assert "next message must have the number" in (
        member(*OPERATOR).get(f"{LIST}{row(using).pk}/reset/").content.decode()
    )
    reset(member(*OPERATOR), using)
    with transaction.atomic(using=using):
        assert accept("peer-7", epoch=3, sequence=9) == Duplicate(9)
        assert accept("peer-7", epoch=3, sequence=10) == Accepted()
