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
    Outgoing,
    Refused,
    Relay,
    publish,
    queue,
)
from idempotency_django.contrib.messaging.inbox.processing import (
    INBOX,
    claim,
    mark,
)
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.contrib.messaging.outbox.relay import OUTBOX
from idempotency_django.contrib.messaging.queue import LOOK
from idempotency_django.contrib.messaging.settling import discard, retry
from idempotency_django.models import DatabaseNow
from idempotency_django.testing import in_threads
from tests.contrib.messaging.outbox.conftest import Broker
from tests.support.plans import buffers_read

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
    claimed = claim((), 10)
    for message in claimed:
        assert mark(message, state="done", process_after=None)
    return len(claimed)


@pytest.mark.parametrize("kind", ["inbox", "outbox"])
def test_backlog(using: str, kind: str) -> None:
    """With 5,000 waiting messages of a group, the next ones cost what they cost with 100."""
    relay = Relay(using=using, batch_size=10)
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


def test_slow_group(using: str) -> None:
    """Another group's message waits for a few messages of a group with a backlog, not for all."""
    write(using, 250, "slow")

    def send(message: Outgoing) -> None:
        if message.group == "slow" and message.data == 3:
            with transaction.atomic(using=using):
                publish("orders", 1, type="n", group="quick", using=using)

    Broker.refuse = staticmethod(send)
    assert Relay(using=using).drain() == 251
    [place] = got("quick")
    assert place <= 3 + 2 * 10  # of the batch in hand, and of the one with the other group
    assert [each.data for each in Broker.got if each.group == "slow"] == [*range(250)]


def test_burst(using: str) -> None:
    """Many messages that were just written to a group hide none of another group."""
    count = 3 * LOOK
    write(using, count, "slow")
    receive(using, count, "slow")
    write(using, 1, "quick")
    receive(using, 1, "quick")
    Relay(using=using).send_batch()
    assert len(got("quick")) == 1
    assert [each.message_id for each in claim((), 10)] == ["slow0", "quick0"]
    waiting = {"state": "pending", "process_after": None}
    assert InboxMessage.objects.using(using).filter(**waiting).count() == count - 1


@pytest.mark.parametrize("kind", ["inbox", "outbox"])
def test_behind_messages_in_hand(using: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction holds the first messages of several groups, and more wait after them than one
    statement examines: they hide no other group, and each is handled once, in order.
    """
    if connections[using].vendor == "sqlite":
        pytest.skip("SQLite has one writer")
    monkeypatch.setattr(queue, "LOOK", 5)
    groups, count = [f"g{at}" for at in range(8)], 6
    store, table = (receive, INBOX) if kind == "inbox" else (write, OUTBOX)
    for name in groups:
        store(using, count, name)
    store(using, 1, "quick")
    look, looks = table._look, list[int]()

    def counted(due: Any, most: int) -> Any:
        looks.append(most)
        assert len(looks) <= 20, looks
        return look(due, most)

    monkeypatch.setattr(table, "_look", counted)
    rows = table.all(using)
    first = [rows.filter(group=name).order_by("pk")[:1].get().pk for name in groups]
    held, claimed = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic(using=using):
            assert len(rows.select_for_update().filter(pk__in=first)) == len(groups)
            held.set()
            assert claimed.wait(30)

    def others() -> list[str]:
        lease = {"process_after": DatabaseNow() + timedelta(minutes=1)}
        return [head.stream.partition("/")[2] for head in table.claim(rows, 3, lease)]

    def claims() -> None:
        assert held.wait(30)
        try:
            assert others() == ["quick"]
            assert rows.filter(process_after=None).count() == len(groups) * (count - 2)
            looks.clear()
            assert others() == []
        finally:
            claimed.set()

    in_threads([hold, claims])
    monkeypatch.undo()
    rows.filter(group="quick").delete()
    done: list[tuple[str, str]] = []
    while heads := table.claim(rows, 3, {"process_after": DatabaseNow() + timedelta(minutes=1)}):
        for each in table.rows(using, heads, {}):
            done.append((each.group, each.message_id))
            table.finish(rows.filter(pk=each.pk), [each], state="done", process_after=None)
    for name in groups:
        in_order = [f"{name}{at}" for at in range(count)]
        assert [message_id for group, message_id in done if group == name] == in_order


def test_idle(using: str) -> None:
    """An idle relay or processor reads, and takes no lock: one statement, in no transaction."""
    write(using, 2, "g")
    OutboxMessage.objects.using(using).update(process_after=DatabaseNow() + timedelta(hours=1))
    relay = Relay(using=using)
    for idle in (relay.send_batch, lambda: len(claim((), 10))):
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
            assert claim((), 10) == []
        finally:
            looked.set()

    in_threads([finish, look])
    assert [each.message_id for each in claim((), 10)] == ["next"]


@pytest.mark.parametrize("settle", [retry, discard, None])
def test_settled(using: str, settle: Any) -> None:
    """A group whose first message was dead-lettered goes on when that is settled, or is deleted."""
    write(using, 3, "g")
    Broker.refuse = staticmethod(
        lambda message: Refused("no", final=True) if message.data == 0 and not retried else None
    )
    retried: list[int] = []
    relay, rows = Relay(using=using), OutboxMessage.objects.using(using)
    relay.drain()
    assert relay.drain() == 0
    assert (
        list(rows.order_by("sequence").values_list("state", "process_after"))[1:]
        == [("pending", None)] * 2
    )
    retried.append(1)
    if settle:
        settle(rows.get(state="dead"), by="ann")
    else:
        rows.filter(state="dead").delete()
    relay.drain()
    assert [each.data for each in Broker.got] == ([0, 1, 2] if settle == retry else [1, 2])


@contextmanager
def searching(monkeypatch: pytest.MonkeyPatch, messages: int) -> Iterator[None]:
    """A search reads this number of messages at a time, and begins with the first group."""
    monkeypatch.setattr(queue, "SEARCHED", messages)
    for each in (INBOX, OUTBOX):
        monkeypatch.setattr(each, "_after", "")
    yield


def test_first_of_inbox_deleted(using: str) -> None:
    """A group of the inbox whose first message was deleted goes on."""
    receive(using, 3, "g")
    [first] = claim((), 10)
    mark(first, state="dead", process_after=None)
    assert claim((), 10) == []
    assert INBOX.revive(using) == 0  # the dead letter is there
    InboxMessage.objects.using(using).filter(pk=first.pk).delete()
    assert INBOX.revive(using) == 1
    assert [each.message_id for each in claim((), 10)] == ["g1"]
    assert INBOX.revive(using) == 0


def test_many_groups_whose_first_is_gone(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found a few at a time, and each of them: the next look begins after the last one."""
    groups = [f"g{at}" for at in range(7)]
    for group in groups:
        write(using, 3, group)
    rows = OutboxMessage.objects.using(using)
    Relay(using=using, batch_size=7).send_batch()
    rows.filter(state="pending").update(process_after=None)
    rows.filter(group="g1", sequence=2).update(state="dead")
    rows.filter(group="g2", sequence=2).update(process_after=DatabaseNow() + timedelta(hours=1))
    with searching(monkeypatch, 5):
        found, after = OUTBOX.stopped(using, seconds=0)
        assert ([*found], after) == (["orders/g0"], "orders/g2")
        found, after = OUTBOX.stopped(using, seconds=60)
        assert sorted(found) == [f"orders/{each}" for each in groups if each not in ("g1", "g2")]
        monkeypatch.setattr(queue, "REVIVAL", 0)
        assert [OUTBOX.revive(using) for _ in range(4)] == [1, 3, 1, 0]
    Relay(using=using).drain()
    left = rows.filter(state="pending").values_list("group", "sequence")
    assert sorted(left) == [("g1", 3), ("g2", 2), ("g2", 3)]


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
        assert [each.message_id for each in claim((), 2)] == ["late0"]
    else:
        assert Relay(using=using, batch_size=2).drain() == 1
        assert len(got("late")) == 1


def test_cost_of_what_is_set_aside(using: str) -> None:
    """With 2,000 messages behind dead letters, an idle run and a purge cost what they cost with
    400: a search reads up to 100 messages of a group, and leaps over the others.
    """
    runs: dict[str, Callable[[], object]] = {
        "relay": lambda: Relay(using=using).drain(),
        "inbox": lambda: (claim((), 10), INBOX.revive(using)),
        "purges": lambda: [each.purge(timedelta(0), 100) for each in (INBOX, OUTBOX)],
    }
    costs: dict[str, list[int]] = {name: [] for name in runs}
    for count in (8 * FEW, MANY):
        for group in ("a", "b"):
            receive(using, count // 2, group)
            write(using, count // 2, group)
        for model in (InboxMessage, OutboxMessage):
            rows = model._default_manager.using(using)
            rows.update(process_after=None)
            first = [rows.filter(group=each).order_by("pk").first() for each in ("a", "b")]
            rows.filter(pk__in=[each.pk for each in first if each]).update(state="dead")
        analyze(using)
        for name, run in runs.items():
            with work(using) as counted:
                run()
            costs[name] += counted
        for model in (InboxMessage, OutboxMessage):
            model._default_manager.using(using).all().delete()
    assert all(many <= 1.5 * few for few, many in costs.values()), costs


@pytest.mark.skipif("postgres" not in settings.ALIASES, reason="the buffers are PostgreSQL's")
def test_cost_after_many_without_a_group() -> None:
    """A claim does not walk what the index remembers of messages without a group that were sent."""
    alias = settings.ALIASES["postgres"]
    rows = OutboxMessage.objects.using(alias)
    buffers = []
    for count in (1, 5_000):
        OutboxMessage.objects.using(alias).bulk_create(
            OutboxMessage(
                message_id=f"{count}-{at}",
                topic="orders",
                type="n",
                payload="1",
                created_at=DatabaseNow(),
                process_after=DatabaseNow(),
            )
            for at in range(count + 100)
        )
        rows.filter(pk__in=[*rows.order_by("pk").values_list("pk", flat=True)[:count]]).update(
            state="done", process_after=None, purge_at=DatabaseNow()
        )
        with CaptureQueriesContext(connections[alias]) as queries, transaction.atomic(using=alias):
            assert len(OUTBOX.claim(rows, 100, {"process_after": DatabaseNow()})) == 100
            transaction.set_rollback(True, using=alias)
        looks = [each["sql"] for each in queries if "ORDER BY" in each["sql"]]
        buffers.append(sum(buffers_read(alias, each) for each in looks))
        rows.all().delete()
    assert buffers[1] <= 3 * buffers[0], buffers


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
                    publish("orders", at, type="n", group=name, using=using)
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
        relay, ends = Relay(using=using, batch_size=7), 0
        while ends < 2:  # once more after the writers' end
            ends += all_written.is_set()
            if kind == "outbox":
                relay.drain()
                continue
            while claimed := claim((), 3):
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
        Relay(using=using).drain()
        done = [(each.group, each.data) for each in Broker.got]
    else:
        work()
    for name in groups:
        assert [at for group, at in done if group == name] == [*range(count)]
