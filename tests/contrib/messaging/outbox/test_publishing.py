"""Publishing: what is written, and when nothing is."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from idempotency_django.contrib.messaging import Message, Relay, publish, publish_many
from idempotency_django.contrib.messaging.models import OutboxMessage, OutboxStream
from idempotency_django.testing import in_threads
from tests.contrib.messaging.settling import settle
from tests.support.shared import LONG_AGO

from .conftest import Broker, outbox

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.usefixtures("broker"),
    pytest.mark.driver,
]


def paid(number: int, using: str, **options: Any) -> str:
    """Publish that an order was paid."""
    return publish("orders", {"id": number}, type="order.paid", **options)


def test_committed(using: str, broker: type[Broker]) -> None:
    """What was committed is sent, as it was published."""
    with transaction.atomic(using=using):
        published = paid(17, using, group="order-17")
    assert Relay().drain() == 1
    [message] = broker.got
    assert message.message_id == published
    assert message.topic == "orders"
    assert message.group == "order-17"
    assert message.sequence == 1
    assert message.data == {"id": 17}
    assert Relay().drain() == 0


def test_rolled_back(using: str, broker: type[Broker]) -> None:
    """What was rolled back is not sent, and leaves no gap in the numbers of its group."""
    for number in range(3):
        with transaction.atomic(using=using):
            paid(number, using, group="a")
            transaction.set_rollback(number == 1, using=using)
    Relay().drain()
    assert [(m.data["id"], m.sequence) for m in broker.got] == [(0, 1), (2, 2)]


def test_outside_of_a_transaction(using: str) -> None:
    """Nothing could be common to the change and the message, so it is refused."""
    with pytest.raises(ImproperlyConfigured, match="outside of a transaction"):
        paid(1, using)
    assert not OutboxMessage.objects.using(using).exists()


@pytest.mark.parametrize(("group", "statements"), [(None, 1), ("a", 2)])
def test_statements(using: str, group: str | None, statements: int) -> None:
    """One statement publishes a message, and one more numbers it in its group."""
    with transaction.atomic(using=using), CaptureQueriesContext(connections[using]) as queries:
        paid(1, using, group=group)
    assert len([q for q in queries if "INSERT" in q["sql"]]) == statements
    assert len(queries) == statements + 0


def test_many(using: str, broker: type[Broker]) -> None:
    """Many at once are numbered in the order that they are given in, group by group."""
    messages = [
        Message(topic="orders", data={"id": at}, type="order.paid", group="ab"[at % 2])
        for at in range(6)
    ]
    with transaction.atomic(using=using), CaptureQueriesContext(connections[using]) as queries:
        ids = publish_many(messages)
    assert len(queries) == 3
    Relay().drain()
    got = {(m.group, m.sequence): (m.data["id"], m.message_id) for m in broker.got}
    assert got == {("ab"[at % 2], at // 2 + 1): (at, ids[at]) for at in range(6)}


def test_window(using: str, broker: type[Broker]) -> None:
    """Within the window the same dedup id is accepted once; after it, again."""
    for window in (timedelta(minutes=5), None):
        with transaction.atomic(using=using):
            published = paid(1, using, group="a", dedup_id="d", window=window)
        assert OutboxMessage.objects.using(using).get().message_id == published
    OutboxMessage.objects.using(using).update(dedup_until=LONG_AGO)
    with transaction.atomic(using=using):
        paid(3, using, group="a", dedup_id="d")
    Relay().drain()
    assert [(m.data["id"], m.sequence) for m in broker.got] == [(1, 1), (3, 2)]
    assert OutboxStream.objects.using(using).get().last_sequence == 2


def test_window_of_a_discarded_message(using: str, broker: type[Broker]) -> None:
    """What was never sent does not keep the next message with its dedup id from being sent."""
    with outbox(orders={"MAX_ATTEMPTS": 1}):
        broker.refuse = staticmethod(lambda message: ValueError("refused"))
        for number in (1, 2):
            with transaction.atomic(using=using):
                paid(number, using, dedup_id="d")
            Relay().drain()
            for dead in OutboxMessage.objects.using(using).filter(state="dead"):
                settle(dead, "discard", by="ann")
            broker.refuse = staticmethod(lambda message: None)
    assert [message.data["id"] for message in broker.got] == [2]


@pytest.mark.parametrize("group", ["g", None], ids=["grouped", "ungrouped"])
@pytest.mark.parametrize(
    "other",
    [{"data": {"a": 2, "b": [1]}}, {"data": b"1"}, {"type": "order.sent"}],
    ids=["data", "bytes", "type"],
)
def test_other_content(
    using: str, other: dict[str, Any], group: str | None, broker: type[Broker]
) -> None:
    """A message whose id another content has is refused: it would get lost in silence. The order of
    keys is no content.
    """
    named: Any = {"type": "order.paid", "group": group, "dedup_id": "17"}
    with transaction.atomic(using=using):
        first = publish("orders", {"a": 1, "b": [1]}, **named)
        assert publish("orders", {"b": [1], "a": 1}, **named) == first
        with pytest.raises(ValueError, match=r"^The .*'17' is already used .* different"):
            publish("orders", **{"data": {"a": 1, "b": [1]}, **named, **other})
        publish("orders", 2, type="n", group=group)
    Relay().drain()
    numbers = [1, 2] if group else [0, 0]
    assert [(m.data, m.sequence) for m in broker.got] == [
        ({"a": 1, "b": [1]}, numbers[0]),
        (2, numbers[1]),
    ]


def test_other_group(using: str) -> None:
    """A message in another group is another one."""
    with transaction.atomic(using=using):
        paid(1, using, group="a", dedup_id="17")
        with pytest.raises(ValueError, match="different content"):
            paid(1, using, group="b", dedup_id="17")


@pytest.mark.parametrize(
    "data",
    [{1: 2}, {True: 2}, {None: 2}, {"a": {1.5: 2}}, (1, 2), {"a": [(1,)]}, [float("nan")], {1}],
    ids=repr,
)
def test_data_that_json_would_change(using: str, data: Any) -> None:
    """What would arrive as something else is refused, and nothing is written."""
    with transaction.atomic(using=using), pytest.raises(TypeError, match="'n' is not JSON"):
        publish("orders", data, type="n")
    assert not OutboxMessage.objects.using(using).exists()


def test_opposite_order(using: str, broker: type[Broker]) -> None:
    """Calls with the same ids in opposite order wait for each other, and do not deadlock."""
    if connections[using].vendor == "sqlite":
        pytest.skip("SQLite has one writer")

    def publish_all(numbers: list[int]) -> None:
        for turn in range(20):
            ids = [f"{turn}-{number}" for number in numbers]
            messages = [Message(topic="orders", data=1, type="n", dedup_id=each) for each in ids]
            with transaction.atomic(using=using):
                publish_many(messages)

    numbers = list(range(8))
    in_threads([partial(publish_all, numbers), partial(publish_all, numbers[::-1])])
    assert OutboxMessage.objects.using(using).count() == 160


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": ""},
        {"type": "a\x00"},
        {"type": "\ud800"},
        {"type": "t" * 256},
        {"type": "ü" * 128},
        {"type": 5},
        {"group": 5},
        {"window": 5},
        {"window": timedelta(days=365 * 8000)},
    ],
    ids=repr,
)
def test_arguments_that_cannot_be_used(using: str, wrong: dict[str, Any]) -> None:
    """What cannot be stored or sent is refused before the database hears of it."""
    with transaction.atomic(using=using):
        with (
            CaptureQueriesContext(connections[using]) as queries,
            pytest.raises(ValueError, match=r"is not( a)? valid (\w+|for a message)"),
        ):
            publish("orders", 1, **{"type": "n", **wrong})
        assert not queries.captured_queries
        deep: Any = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(TypeError, match="not JSON"):
            publish("orders", deep, type="n")
