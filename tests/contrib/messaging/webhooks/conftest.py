from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from idempotency_django.contrib.messaging.models import InboxMessage
from tests.contrib.messaging.webhooks import receivers
from tests.models import Effect
from tests.support.shared import LONG_AGO


@pytest.fixture
def alias(using: str, settings: Any) -> str:
    """The database of the inbox and of the records, with the receivers' URLs."""
    settings.ROOT_URLCONF = "tests.contrib.messaging.webhooks.receivers"
    return using


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What handlers do is over with the test; what is refused is no news."""
    logging.getLogger("django.request").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("django.request").setLevel(logging.NOTSET)
    receivers.behaviour.clear()


class Inbox:
    """What is in the inbox, and what came of it."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def rows(self) -> Any:
        return InboxMessage.objects.using(self.alias).order_by("pk")

    def row(self, message_id: str = "m-1") -> InboxMessage:
        return InboxMessage.objects.using(self.alias).get(message_id=message_id)

    def states(self) -> list[str]:
        return [row.state for row in self.rows()]

    def effects(self) -> list[str]:
        rows = Effect.objects.using(self.alias).order_by("pk")
        return list(rows.values_list("reference", flat=True))

    def due_now(self) -> None:
        """Let nobody wait for the next attempt."""
        self.rows().exclude(process_after=None).update(process_after=LONG_AGO)


@pytest.fixture
def inbox(alias: str) -> Inbox:
    return Inbox(alias)
