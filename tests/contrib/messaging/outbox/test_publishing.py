"""Publishing: what is written, and when nothing is."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from idempotency_django.contrib.messaging import Event, Relay, publish
from idempotency_django.contrib.messaging.models import OutboxMessage, OutboxStream
from tests.contrib.messaging.settling import settle

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
    assert message.id == published
    assert message.source == "/orders"
    assert message.subject == "order-17"
    assert message.extensions["sequence"] == 1
    assert message.data == {"id": 17}
    assert Relay().drain() == 0


def test_rolled_back(using: str, broker: type[Broker]) -> None:
    """What was rolled back is not sent, and leaves no gap in the numbers of its group."""
    for number in range(3):
        with transaction.atomic(using=using):
            paid(number, using, group="a")
            transaction.set_rollback(number == 1, using=using)
    Relay().drain()
    assert [(m.data["id"], m.extensions["sequence"]) for m in broker.got] == [(0, 1), (2, 2)]


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
    assert len(queries) == statements


def test_dedup(using: str, broker: type[Broker]) -> None:
    """The same dedup id is accepted once, for as long as its message is kept; then again."""
    for _ in range(2):
        with transaction.atomic(using=using):
            published = paid(1, using, group="a", dedup_id="d")
        assert OutboxMessage.objects.using(using).get().message_id == published
        Relay().drain()
    OutboxMessage.objects.using(using).all().delete()
    with transaction.atomic(using=using):
        assert paid(3, using, group="a", dedup_id="d") != published
    Relay().drain()
    assert [(m.data["id"], m.extensions["sequence"]) for m in broker.got] == [(1, 1), (3, 2)]
    assert OutboxStream.objects.using(using).get().last_sequence == 2


def test_discarded_with_a_dedup_id(using: str, broker: type[Broker]) -> None:
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
    [{"data": {"a": 2, "b": [1]}}, {"type": "order.sent"}, {"group": "other"}],
    ids=["data", "type", "group"],
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
        with pytest.raises(ValueError, match=rf"by the message '{first}' with diff"):
            publish("orders", **{"data": {"a": 1, "b": [1]}, **named, **other})
        publish("orders", 2, type="n", group=group)
    Relay().drain()
    numbers = [1, 2] if group else [None, None]
    assert [(m.data, m.extensions.get("sequence")) for m in broker.got] == [
        ({"a": 1, "b": [1]}, numbers[0]),
        (2, numbers[1]),
    ]


@pytest.mark.parametrize(
    "data",
    [{1: 2}, {"a": [(1,)]}, [float("nan")], {1}, b"1"],
    ids=repr,
)
def test_data_that_json_would_change(using: str, data: Any) -> None:
    """What would arrive as something else is refused, and nothing is written."""
    with transaction.atomic(using=using), pytest.raises(TypeError, match="'n' is not JSON"):
        publish("orders", data, type="n")
    assert not OutboxMessage.objects.using(using).exists()


def nested(levels: int) -> Any:
    """As many lists and dicts within one another."""
    value: Any = {"a": []}
    for _ in range(levels - 2):
        value = [value]
    return value


@pytest.mark.parametrize(
    "data", [nested(100), [[at, {}] for at in range(100)]], ids=["nesting", "side by side"]
)
def test_deepest(using: str, broker: type[Broker], data: Any) -> None:
    """Data that are nested as deeply as may be are published, and an event of them can be read."""
    with transaction.atomic(using=using):
        publish("orders", data, type="n")
    Relay().drain()
    [message] = broker.got
    assert Event.from_json(message.to_json()).data == data


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"topic": "order"}, ImproperlyConfigured, "Did you mean 'orders'"),
        ({"type": ""}, ValueError, "is not a valid type of a message"),
        ({"type": "a\x00"}, ValueError, "is not a valid type of a message"),
        ({"type": "ü" * 128}, ValueError, "is not a valid type of a message"),
        ({"group": "é"}, ValueError, "printable ASCII"),
        ({"group": "g" * 151}, ValueError, "up to 150"),
        ({"dedup_id": 17}, TypeError, "is not a string"),
        ({"data": nested(101)}, ValueError, "more than 100 nested lists and objects"),
        ({"data": nested(100_000)}, TypeError, "is not JSON"),
    ],
    ids=["topic", "no type", "control", "long type", "ASCII", "long group", "id", "nested", "deep"],
)
def test_refused(using: str, wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    """What cannot be stored or sent is refused, in words, before the database hears of it."""
    given = {"topic": "orders", "data": 1, "type": "n", **wrong}
    with (
        transaction.atomic(using=using),
        CaptureQueriesContext(connections[using]) as queries,
        pytest.raises(error, match=text),
    ):
        publish(given.pop("topic"), given.pop("data"), **given)
    assert not queries.captured_queries
