"""``manage.py settle_messages``: many dead letters at once, by place and error."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from idempotency_django.contrib.messaging import Relay, after_commit, publish
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.models import DatabaseNow

from .conftest import changed_settings, outbox

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


def command(*arguments: str) -> str:
    """What the command says."""
    said = StringIO()
    call_command("settle_messages", *arguments, stdout=said)
    return said.getvalue()


def dead(topic: str, count: int, error: str) -> None:
    first = OutboxMessage.objects.count()
    OutboxMessage.objects.bulk_create(
        OutboxMessage(
            message_id=f"m-{first + at}",
            topic=topic,
            type="t",
            payload="1",
            state="dead",
            error=error,
            created_at=DatabaseNow(),
        )
        for at in range(count)
    )


def fails() -> None:
    raise ValueError("Not today.")


def test_call_whose_records_are_in_no_database() -> None:
    """A call after the commit can be retried wherever the project keeps its records."""
    stores = {
        "default": {"BACKEND": "idempotency_django.stores.database.DatabaseStore"},
        "memory": {"BACKEND": "idempotency_django.stores.memory.MemoryStore"},
    }
    calls = {"after_commit": {"MAX_ATTEMPTS": 1}}
    with outbox(**calls), changed_settings(STORES=stores, POLICY={"store": "memory"}):
        with transaction.atomic():
            after_commit(fails)
        Relay().drain()
        assert states(attempts=1) == {"dead"}
        assert command("retry", "--topic", "after_commit") == "1 message: retry.\n"
        assert states(attempts=0) == {"pending"}
        Relay().drain()
        assert states(attempts=1) == {"dead"}


def states(**of: str) -> set[str]:
    return set(OutboxMessage.objects.filter(**of).values_list("state", flat=True))


def test_by_topic_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead letters of the topic with the error are settled, however many, and no others."""
    path = "idempotency_django.contrib.messaging.settling.AT_ONCE"
    monkeypatch.setattr(path, 7)
    dead("orders", 30, "ConnectionError: Connection refused")
    dead("orders", 2, "ValueError: No such customer")
    dead("mails", 2, "ConnectionError: Connection refused")
    backend = {"BACKEND": "tests.contrib.messaging.outbox.conftest.Broker"}
    with outbox(orders=backend, mails=backend):
        chosen = ("--topic", "orders", "--error", "refused")
        assert command("retry", *chosen) == "30 messages: retry.\n"
        assert states(topic="orders", error="") == {"pending"}
        assert states(topic="mails") == states(error__contains="customer") == {"dead"}
        assert command("discard", "--topic", "orders") == "2 messages: discard.\n"
    assert states(topic="orders") == {"pending", "discarded"}
    assert states(topic="mails") == {"dead"}


def test_statements() -> None:
    """However many are retried, it takes the same few statements."""
    dead("orders", 50, "ConnectionError: Connection refused")
    with outbox(), CaptureQueriesContext(connections["default"]) as queries:
        assert command("retry", "--topic", "orders") == "50 messages: retry.\n"
    assert len(queries) < 10
    assert states() == {"pending"}


def test_refused() -> None:
    """What cannot be settled is left as it is, with the reason; a topic or source is named."""
    InboxMessage.objects.bulk_create(
        InboxMessage(
            source="consumer:gone",
            message_id=str(at),
            body=b"{}",
            state="dead",
            received_at=DatabaseNow(),
        )
        for at in range(3)
    )
    said = command("retry", "--source", "consumer:gone")
    assert said.startswith("0 messages: retry.\nLeft unchanged: 3 messages. ")
    assert set(InboxMessage.objects.values_list("state", flat=True)) == {"dead"}
    dead("gone", 1, "ConnectionError: refused")
    assert "There is no topic 'gone'" in command("discard", "--topic", "gone")
    assert states(topic="gone") == {"dead"}
    with pytest.raises(CommandError, match="one of the arguments --topic --source is required"):
        command("retry")
    assert connections["default"].in_atomic_block is False


def test_groups_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group continues whose dead letter is discarded, with few statements for many."""
    monkeypatch.setattr("idempotency_django.contrib.messaging.settling.AT_ONCE", 10)
    backend = {"BACKEND": "tests.contrib.messaging.outbox.conftest.Broker"}
    with outbox(orders=backend):
        with transaction.atomic():
            for at in range(25):
                for number in range(2):
                    publish("orders", number, type="t", group=f"g{at}")
        OutboxMessage.objects.filter(payload="0").update(state="dead", process_after=None)
        OutboxMessage.objects.filter(payload="1").update(process_after=None)  # set aside
        with CaptureQueriesContext(connections["default"]) as queries:
            assert command("discard", "--topic", "orders") == "25 messages: discard.\n"
    assert states(payload="0") == {"discarded"}
    assert not OutboxMessage.objects.filter(payload="1", process_after=None).exists()
    updates = [each["sql"] for each in queries.captured_queries if each["sql"].startswith("UPDATE")]
    assert len(updates) == 6  # of the messages and their followers, of ten groups at a time
