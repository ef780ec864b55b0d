"""Streams in the admin: who may look sees them."""

from __future__ import annotations

from collections.abc import Iterator
from html import unescape

import pytest
from django.test import Client, override_settings

from idempotency_django.contrib.messaging.models import StreamPosition
from idempotency_django.contrib.messaging.streams import (
    Stream,
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


def test_read_only(stream: Stream, using: str) -> None:
    """The list and the page show the stream; nothing can be added, changed or deleted."""
    client, pk = member("view_streamposition"), row(using).pk
    for address in (LIST, f"{LIST}?q=billing", f"{LIST}{pk}/change/"):
        text = unescape(client.get(address).content.decode())
        assert "billing/orders/0" in text
        assert "41" in text
    assert "billing" not in client.get(f"{LIST}?q=orders").content.decode().split("results")[-1]
    superuser = Client()
    superuser.force_login(StaffFactory(is_superuser=True))
    for address in (f"{LIST}add/", f"{LIST}{pk}/delete/"):
        assert superuser.get(address).status_code == 403
    assert superuser.post(f"{LIST}{pk}/change/", {"position": 1}).status_code == 403
