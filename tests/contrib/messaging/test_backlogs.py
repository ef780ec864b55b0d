"""What one message of a group costs is the same, however many of the group wait after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from idempotency_django.contrib.messaging import (
    Relay,
    inbox,
    queue,
)
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.contrib.messaging.outbox.relay import OUTBOX
from idempotency_django.models import DatabaseNow
from idempotency_django.testing import in_threads
from tests.contrib.messaging.outbox.conftest import Broker

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.usefixtures("broker"),
]

FEW, MANY = 50, 2_000


@contextmanager
def work(using: str) -> Iterator[list[int]]:
    """Counts what the database does: the rows that it reads, or the steps of SQLite's machine."""
    connection, counted = connections[using], [0]
    if connection.vendor == "sqlite":
        connection.ensure_connection()

        def step() -> None:
            counted[0] += 1

        connection.connection.set_progress_handler(step, 1)
        try:
            yield counted
        finally:
            connection.connection.set_progress_handler(None, 1)
        return
    asked = (
        "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_xact_user_tables"
        if connection.vendor == "postgresql"
        else "SELECT sum(variable_value) FROM information_schema.session_status "
        "WHERE variable_name LIKE 'Handler_read%'"
    )

    def so_far() -> int:
        with connection.cursor() as cursor:
            cursor.execute(asked)
            return int(cursor.fetchone()[0])

    with transaction.atomic(using=using):  # PostgreSQL counts within a transaction
        before = so_far()
        yield counted
        counted[0] = so_far() - before


def cost(using: str, function: Callable[[], Any]) -> int:
    """How much the database does for it."""
    with work(using) as counted:
        assert function()
    return counted[0]


def write(using: str, count: int, group: str, first: int = 1) -> None:
    OutboxMessage.objects.using(using).bulk_create(
        OutboxMessage(
            message_id=f"{group}{first + at}",
            topic="orders",
            stream=f"orders/{group}",
            group=group,
            sequence=first + at,
            type="n",
            payload=str(at),
            created_at=DatabaseNow(),
            process_after=DatabaseNow(),
        )
        for at in range(count)
    )


def claim(using: str) -> list[Any]:
    """Claim what is due, as a relay does."""
    changes = {"process_after": DatabaseNow() + timedelta(minutes=1)}
    return OUTBOX.rows(using, OUTBOX.claim(OUTBOX.all(using), 10, changes), changes)


def analyze(using: str) -> None:
    """Let the planner know what is there, as it does after a while."""
    tables = ", ".join(model._meta.db_table for model in (InboxMessage, OutboxMessage))
    word = "TABLE " if connections[using].vendor == "mysql" else ""
    if connections[using].vendor != "sqlite":
        with connections[using].cursor() as cursor:
            cursor.execute(f"ANALYZE {word}{tables}")


def test_backlog(using: str) -> None:
    """With 2,000 waiting messages of a group, the next ones cost what they cost with 50."""
    relay = Relay(batch_size=10)
    costs = []
    for count, group in ((FEW, "few"), (MANY, "many")):
        write(using, 3, "other")
        write(using, count, group)
        relay.send_batch()  # which sees that they wait
        analyze(using)
        costs.append(cost(using, relay.send_batch))
        OutboxMessage.objects.using(using).all().delete()
    assert costs[1] <= 1.5 * costs[0]


def test_idle(using: str) -> None:
    """An idle relay or processor reads, and takes no lock: one statement, in no transaction."""
    write(using, 2, "g")
    OutboxMessage.objects.using(using).update(process_after=DatabaseNow() + timedelta(hours=1))
    relay = Relay()
    for idle in (relay.send_batch, lambda: len(inbox.claim(10))):
        with CaptureQueriesContext(connections[using]) as queries:
            assert idle() == 0
        assert [query["sql"].split()[0] for query in queries] == ["SELECT"]


def test_finished_meanwhile(using: str) -> None:
    """A message is not set aside while the one that it would wait for is being finished."""
    if connections[using].vendor == "sqlite":
        pytest.skip("SQLite has one writer")
    write(using, 1, "g")
    finished, looked = threading.Event(), threading.Event()

    def finish() -> None:
        with transaction.atomic(using=using):
            [first] = claim(using)
            rows = OUTBOX.all(using).filter(pk=first.pk)
            assert OUTBOX.finish(rows, [first], state="done", process_after=None) == 1
            finished.set()
            assert looked.wait(30)

    def look() -> None:
        assert finished.wait(30)
        try:
            write(using, 1, "g", first=2)
            assert claim(using) == []
        finally:
            looked.set()

    in_threads([finish, look])
    assert [each.sequence for each in claim(using)] == [2]


def test_behind_a_dead_letter(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many messages wait behind a dead letter, a run does not end before later ones."""
    monkeypatch.setattr(queue, "LOOK", 5)
    monkeypatch.setattr(queue, "LOOKS", 2)
    write(using, 100, "g")
    [first, *_] = OutboxMessage.objects.using(using).order_by("pk")
    OutboxMessage.objects.using(using).filter(pk=first.pk).update(state="dead", process_after=None)
    write(using, 1, "late")
    assert Relay(batch_size=2).drain() == 1
    assert [message.subject for message in Broker.got] == ["late"]
