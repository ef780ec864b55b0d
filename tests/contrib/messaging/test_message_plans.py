"""How PostgreSQL finds messages: by indexes that lead to them, whatever its statistics know."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import connections, transaction
from django.db.models import Q
from django.test.utils import CaptureQueriesContext

from idempotency_django.contrib.messaging.inbox import processing as claiming
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.contrib.messaging.outbox.relay import Batch
from idempotency_django.models import DatabaseNow
from tests.support.nightly import few
from tests.support.plans import rows_read

pytestmark = [
    pytest.mark.skipif("postgres" not in settings.ALIASES, reason="the plans are PostgreSQL's"),
    pytest.mark.django_db(transaction=True, databases="__all__"),
]
# What is due in a group may be compared with one another: 10 × 10 rows. None of the many is read.
MANY, DUE, MOST = 1000, 10, 200
LEASE = timedelta(minutes=1)


@pytest.fixture
def using(settings: Any) -> str:
    """A database that knows of a few messages, and has many more since."""
    alias: str = settings.ALIASES["postgres"]
    settings.IDEMPOTENCY = {"MESSAGING_DATABASE": alias}
    for count in (MOST, MANY):
        receive(alias, "done", count, state="done", process_after=None)
        publish(alias, "done", count, state="done", process_after=None)
        with connections[alias].cursor() as cursor:
            for model in (InboxMessage, OutboxMessage):
                if count == MOST:
                    cursor.execute(f"ANALYZE {model._meta.db_table}")
    return alias


def receive(using: str, name: str, count: int, **values: Any) -> None:
    given = {"source": name, "body": b"", "received_at": DatabaseNow(), **values}
    first = InboxMessage.objects.using(using).count()
    InboxMessage.objects.using(using).bulk_create(
        InboxMessage(message_id=f"{first + at}", **given) for at in range(count)
    )


def publish(using: str, name: str, count: int, **values: Any) -> None:
    given = {"topic": "orders", "type": "t", "payload": "", "created_at": DatabaseNow(), **values}
    first = OutboxMessage.objects.using(using).count()
    OutboxMessage.objects.using(using).bulk_create(
        OutboxMessage(message_id=f"{name}{at}", sequence=at, **given)
        for at in range(first, first + count)
    )


def read(using: str, function: Callable[[], Any]) -> int:
    """The most rows that one of the statements has looked at."""
    with CaptureQueriesContext(connections[using]) as queries:
        function()
    asked = [query["sql"] for query in queries]
    found = [sql for sql in asked if sql.split()[0] in ("SELECT", "UPDATE")]
    assert found
    return max(rows_read(using, sql) for sql in found)


def test_inbox(using: str) -> None:
    """Messages that are due are found among many of a new source that are done."""
    receive(using, "busy", MANY, state="done", process_after=None)
    receive(using, "busy", MANY, state="done", process_after=None, group="a")
    receive(using, "busy", DUE, process_after=DatabaseNow(), group="b")
    assert read(using, lambda: claiming.claim(10)) <= MOST
    rows = InboxMessage.objects.using(using)
    assert read(using, lambda: rows.get(source="busy", message_id=f"{MANY + MOST + 7}")) == 1


@pytest.mark.parametrize("group", few(["", "a"]))
def test_outbox(using: str, group: str) -> None:
    """A batch is found and noted among many messages of a stream that wait, or are sent."""
    grouped = {"group": group, "stream": f"orders/{group}" if group else ""}
    publish(using, "old", MANY, state="done", process_after=None, **grouped)
    publish(using, "due", DUE, process_after=DatabaseNow(), **grouped)
    publish(using, "new", MANY, process_after=DatabaseNow() + LEASE, **grouped)
    with transaction.atomic(using=using):
        batch = Batch.claim(using, Q(), 10, LEASE)
        assert batch.messages
        assert read(using, lambda: batch.mark_sent(batch.messages, LEASE)) <= MOST
        transaction.set_rollback(True, using=using)
    assert read(using, lambda: Batch.claim(using, Q(), 10, LEASE)) <= MOST
