"""What one message of a group costs is the same, however many of the group wait after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.conf import settings
from django.db import connections, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from idempotency_django.contrib.messaging import (
    Refused,
    Relay,
    publish,
    queue,
)
from idempotency_django.contrib.messaging.inbox import INBOX, claim, mark
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.models import DatabaseNow
from idempotency_django.testing import in_threads
from tests.contrib.messaging.outbox.conftest import Broker
from tests.contrib.messaging.settling import settle

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

FEW, MANY = 50, 2_000


@pytest.fixture(params=list(settings.ALIASES))
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    """The alias of each database, with an outbox and an inbox."""
    alias: str = settings.ALIASES[request.param]
    Broker.got = []
    Broker.refuse = staticmethod(lambda message: None)
    Broker.before = staticmethod(lambda messages: None)
    orders = {"BACKEND": "tests.contrib.messaging.outbox.conftest.Broker"}
    with override_settings(IDEMPOTENCY={"OUTBOX": {"orders": orders}, "MESSAGING_DATABASE": alias}):
        yield alias


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


def receive(using: str, count: int, group: str) -> None:
    InboxMessage.objects.using(using).bulk_create(
        InboxMessage(
            source="shop",
            group=group,
            stream=f"shop/{group}",
            message_id=f"{group}{at}",
            body=b"",
            received_at=DatabaseNow(),
            process_after=DatabaseNow(),
        )
        for at in range(count)
    )


def write(using: str, count: int, group: str) -> None:
    OutboxMessage.objects.using(using).bulk_create(
        OutboxMessage(
            message_id=f"{group}{at}",
            topic="orders",
            stream=f"orders/{group}",
            group=group,
            sequence=at + 1,
            type="n",
            payload=str(at),
            created_at=DatabaseNow(),
            process_after=DatabaseNow(),
        )
        for at in range(count)
    )


def analyze(using: str) -> None:
    """Let the planner know what is there, as it does after a while."""
    tables = ", ".join(model._meta.db_table for model in (InboxMessage, OutboxMessage))
    word = "TABLE " if connections[using].vendor == "mysql" else ""
    if connections[using].vendor != "sqlite":
        with connections[using].cursor() as cursor:
            cursor.execute(f"ANALYZE {word}{tables}")


def handle() -> int:
    """Claim messages of the inbox, and finish them; how many there were."""
    claimed = claim(10)
    for message in claimed:
        assert mark(message, state="done", process_after=None)
    return len(claimed)


@pytest.mark.parametrize("kind", ["inbox", "outbox"])
def test_backlog(using: str, kind: str) -> None:
    """With 5,000 waiting messages of a group, the next ones cost what they cost with 100."""
    relay = Relay(batch_size=10)
    store, step = (receive, handle) if kind == "inbox" else (write, relay.send_batch)
    costs = []
    for count, group in ((FEW, "few"), (MANY, "many")):
        store(using, 3, "other")
        store(using, count, group)
        step()  # which sees that they wait
        analyze(using)
        costs.append(cost(using, step))
        for model in (InboxMessage, OutboxMessage):
            model.objects.using(using).all().delete()
    assert costs[1] <= 1.5 * costs[0]


def got(group: str) -> list[int]:
    """What the broker has of a group, by the place at which it came in."""
    return [at for at, message in enumerate(Broker.got) if message.group == group]


def test_idle(using: str) -> None:
    """An idle relay or processor reads, and takes no lock: one statement, in no transaction."""
    write(using, 2, "g")
    OutboxMessage.objects.using(using).update(process_after=DatabaseNow() + timedelta(hours=1))
    relay = Relay()
    for idle in (relay.send_batch, lambda: len(claim(10))):
        with CaptureQueriesContext(connections[using]) as queries:
            assert idle() == 0
        assert [query["sql"].split()[0] for query in queries] == ["SELECT"]


def test_finished_meanwhile(using: str) -> None:
    """A message is not set aside while the one that it would wait for is being finished."""
    if connections[using].vendor == "sqlite":
        pytest.skip("SQLite has one writer")
    receive(using, 1, "g")
    finished, looked = threading.Event(), threading.Event()

    def finish() -> None:
        with transaction.atomic(using=using):
            assert handle() == 1
            finished.set()
            assert looked.wait(30)

    def look() -> None:
        assert finished.wait(30)
        try:
            InboxMessage.objects.using(using).create(
                source="shop",
                group="g",
                stream="shop/g",
                message_id="next",
                body=b"",
                received_at=DatabaseNow(),
                process_after=DatabaseNow(),
            )
            assert claim(10) == []
        finally:
            looked.set()

    in_threads([finish, look])
    assert [each.message_id for each in claim(10)] == ["next"]


@pytest.mark.parametrize("action", ["retry", "discard", None])
def test_settled(using: str, action: str | None) -> None:
    """A group whose first message was dead-lettered goes on when that is settled, or is deleted."""
    write(using, 3, "g")
    Broker.refuse = staticmethod(
        lambda message: Refused("no", final=True) if message.data == 0 and not retried else None
    )
    retried: list[int] = []
    relay, rows = Relay(), OutboxMessage.objects.using(using)
    relay.drain()
    assert relay.drain() == 0
    assert (
        list(rows.order_by("sequence").values_list("state", "process_after"))[1:]
        == [("pending", None)] * 2
    )
    retried.append(1)
    if action:
        settle(rows.get(state="dead"), action, by="ann")
    else:
        rows.filter(state="dead").delete()
    relay.drain()
    assert [each.data for each in Broker.got] == ([0, 1, 2] if action == "retry" else [1, 2])


def test_first_of_inbox_deleted(using: str) -> None:
    """A group of the inbox whose first message was deleted goes on."""
    receive(using, 3, "g")
    [first] = claim(10)
    mark(first, state="dead", process_after=None)
    assert claim(10) == []
    assert INBOX.revive(using) == 0  # the dead letter is there
    InboxMessage.objects.using(using).filter(pk=first.pk).delete()
    assert INBOX.revive(using) == 1
    assert [each.message_id for each in claim(10)] == ["g1"]
    assert INBOX.revive(using) == 0


@pytest.mark.parametrize("kind", ["inbox", "outbox"])
def test_behind_a_dead_letter(using: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many messages wait behind a dead letter, a run does not end before later ones."""
    monkeypatch.setattr(queue, "LOOK", 5)
    monkeypatch.setattr(queue, "LOOKS", 2)
    store, model = (receive, InboxMessage) if kind == "inbox" else (write, OutboxMessage)
    store(using, 100, "g")
    [first, *_] = model._default_manager.using(using).order_by("pk")
    model._default_manager.using(using).filter(pk=first.pk).update(state="dead", process_after=None)
    store(using, 1, "late")
    if kind == "inbox":
        assert [each.message_id for each in claim(2)] == ["late0"]
    else:
        assert Relay(batch_size=2).drain() == 1
        assert len(got("late")) == 1


@pytest.mark.parametrize("kind", ["inbox", "outbox"])
def test_storm(using: str, kind: str) -> None:
    """Writers and several processes at once: each message once, in order, and none is left."""
    groups, count, writers = ("a", "b"), 30, 2
    written = threading.Semaphore(0)
    done: list[tuple[str, int]] = []

    def writer(name: str) -> None:
        for at in range(count):
            if kind == "outbox":
                with transaction.atomic(using=using):
                    publish("orders", at, type="n", group=name)
            else:
                InboxMessage.objects.using(using).create(
                    source="shop",
                    group=name,
                    stream=f"shop/{name}",
                    message_id=f"{name}{at}",
                    body=b"%d" % at,
                    received_at=DatabaseNow(),
                    process_after=DatabaseNow(),
                )
        written.release()

    def work() -> None:
        relay, ends = Relay(batch_size=7), 0
        while ends < 2:  # once more after the writers' end
            ends += all_written.is_set()
            if kind == "outbox":
                relay.drain()
                continue
            while claimed := claim(3):
                for message in claimed:
                    done.append((message.group, int(bytes(message.body))))
                    assert mark(message, state="done", process_after=None)

    all_written = threading.Event()

    def watch() -> None:
        for _ in range(writers):
            assert written.acquire(timeout=60)
        all_written.set()

    in_threads([*(partial(writer, name) for name in groups), watch, work, work, work])
    if kind == "outbox":
        Relay().drain()
        done = [(each.group, each.data) for each in Broker.got]
    else:
        work()
    for name in groups:
        assert [at for group, at in done if group == name] == [*range(count)]
