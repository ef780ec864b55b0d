"""What each transport does with its broker: every message has one effect, or is kept."""

from __future__ import annotations

import bz2
import json
import lzma
import tracemalloc
import zlib
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from idempotency_django.contrib.messaging import Consumer, Event, dead_letters
from idempotency_django.contrib.messaging.models import InboxMessage
from idempotency_django.errors import StoreUnavailable
from tests.models import Effect
from tests.support import effect_counts

from .brokers import Broker

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

MALFORMED = b'{"specversion": "1.0", "id": '


def paid(number: str, **changes: Any) -> Event:
    """An event, as its sender makes it."""
    return Event(**{"id": number, "source": "/shop", "type": "order.paid", "data": {}, **changes})


def dead() -> dict[str, tuple[str, bytes]]:
    """What is dead-lettered, by its type: the error and the body."""
    rows = InboxMessage.objects.filter(source="consumer:billing", state="dead")
    return {row.type: (row.error, bytes(row.body)) for row in rows}


class Billing:
    """A consumer that makes an effect of each event, and fails as the event says."""

    def __init__(self, **options: Any) -> None:
        self.starts: Counter[str] = Counter()
        self.redelivered: list[tuple[str, bool]] = []
        self.consumer = Consumer("billing", **{"max_attempts": 2, **options})
        self.consumer.on("order.paid", "order.poison")(self.book)

    def book(self, event: Event, execution: Any) -> str:
        self.starts[event.id] += 1
        Effect.objects.create(reference=event.id)
        if event.type == "order.poison":
            raise ValueError("poison")
        if event.data.get("fails", 0) >= self.starts[event.id]:
            raise ValueError("not yet")
        return event.id


def test_every_end(broker: Broker) -> None:
    """One effect for each event, and what cannot be handled is kept, so the broker may forget."""
    billing = Billing()
    broker.publish(paid("a"), paid("b", data={"fails": 1}), paid("a"), MALFORMED)
    broker.publish(paid("p", type="order.poison"), paid("u", type="order.lost"))
    broker.publish_binary(paid("binary", subject='100 % "Käse"', data={"order": "ü"}))
    broker.drain(billing.consumer, lambda: len(effect_counts()) == 3 and len(dead()) == 3)
    assert effect_counts() == {"a": 1, "b": 1, "binary": 1}
    assert billing.starts == {"a": 1, "b": 2, "p": 2, "binary": 1}
    assert broker.left() == 0
    kept = dead()
    assert kept[""][1] == MALFORMED
    assert kept["order.poison"][0].endswith("ValueError: poison")
    assert Event.from_json(kept["order.lost"][1]) == paid("u", type="order.lost")


def test_wrong_compression(place: Any) -> None:
    """RabbitMQ's message that is not compressed as it says is set aside, also if it looks right."""
    billing, broker = Billing(), place("rabbitmq")
    for compression in ("gzip", "nonsense"):
        broker.publish_binary(paid(compression), compression=compression)
    broker.publish(paid("a"))
    kept = InboxMessage.objects.order_by("pk").values_list("error", flat=True)
    broker.drain(billing.consumer, lambda: len(effect_counts()) + len(kept.all()) == 3)
    assert effect_counts() == {"a": 1}
    assert "compression='gzip'" in kept[0]
    assert "compression='nonsense'" in kept[1]
    assert broker.left() == 0


def test_told_apart(place: Any) -> None:
    """RabbitMQ's messages that differ in their headers only are set aside each, whatever their id
    at the broker is, and each of them once.
    """
    billing, broker = Billing(), place("rabbitmq")
    for number in ("a", "b", "a"):
        broker.publish_binary(paid(number, type="order.lost"), **{"cloudEvents:time": "noon"})

    def drained() -> bool:
        return InboxMessage.objects.count() == 2 and broker.ready() == 0

    broker.drain(billing.consumer, drained)
    assert broker.left() == 0
    assert InboxMessage.objects.count() == 2


def test_batches(broker: Broker) -> None:
    """Many in one transaction; neighbours of one that fails commit, and it is tried again."""
    billing = Billing()
    batches: list[int] = []
    real = billing.consumer.handle_many

    def handle_many(events: list[Event], **arguments: Any) -> Any:
        batches.append(len(events))
        return real(events, **arguments)

    billing.consumer.handle_many = handle_many  # type: ignore[method-assign]
    numbers = [str(number) for number in range(20)]
    fails = {"7": 1}
    events = [paid(number, data={"fails": fails.get(number, 0)}) for number in numbers]
    broker.publish(*events)
    broker.drain(billing.consumer, lambda: len(effect_counts()) == 20, batch=10)
    assert effect_counts() == dict.fromkeys(numbers, 1)
    assert max(batches) > 1
    assert broker.left() == 0


@pytest.mark.parametrize("transport", ["kafka", "rabbitmq", "sqs"])
def test_without_the_app(place: Any, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no table for them, the broker keeps them in its dead letters."""
    monkeypatch.setattr(dead_letters, "can_keep", lambda: False)
    billing, broker = Billing(), place(transport)
    lost = paid("u", type="order.lost")
    broker.publish(MALFORMED, lost, paid("a"))
    dead: list[bytes] = []

    def over() -> bool:
        if transport == "kafka":
            dead.clear()  # a topic keeps what was read
        dead.extend(broker.dead())
        return len(dead) == 2 and len(effect_counts()) == 1

    options = {} if transport == "sqs" else {"dead_letter": broker.dead_letter}
    broker.drain(billing.consumer, over, **options)
    assert sorted(dead) == sorted([MALFORMED, lost.to_json().encode()])
    assert broker.left() == 0
    assert not InboxMessage.objects.exists()


def test_unavailable(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the database is down, a message stays where it is, and its broker counts nothing."""
    billing = Billing(max_attempts=1)
    real, calls = billing.consumer.handle, []

    def handle(event: Event, **arguments: Any) -> Any:
        calls.append(arguments["redelivered"])
        if len(calls) < 8:  # more often than any queue of these tests delivers a message
            raise StoreUnavailable
        return real(event, **arguments)

    monkeypatch.setattr(billing.consumer, "handle", handle)
    broker.publish(paid("a"))
    moment = timedelta(milliseconds=50)
    broker.drain(
        billing.consumer, lambda: bool(effect_counts()), pause=moment, longest_pause=moment
    )
    assert effect_counts() == {"a": 1}
    assert len(set(calls)) == 1
    assert (broker.left(), broker.dead(), dead()) == (0, [], {})


@pytest.mark.parametrize(
    ("transport", "told", "options"),
    [
        ("kafka", "dead_letter=", {}),
        ("rabbitmq", "dead_letter=", {}),
        ("rabbitmq", "no queue 'none.at.all'", {"dead_letter": "none.at.all"}),
        ("sqs", "redrive policy", {}),
    ],
)
def test_no_place_for_dead_letters(
    place: Any, transport: str, told: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a place for what cannot be handled, a consumer does not start: nothing is lost."""
    monkeypatch.setattr(dead_letters, "can_keep", lambda: False)
    broker = place(transport, **({"redrive": False} if transport == "sqs" else {}))
    broker.publish(paid("a"), MALFORMED, paid("u", type="order.lost"))
    with pytest.raises(ImproperlyConfigured, match=told):
        broker.drain(Billing().consumer, lambda: bool(effect_counts()), **options)
    assert not effect_counts()
    assert broker.left() == 3


def test_dead_letters_of_rabbitmq(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead letter is the message as it came, with the reason; no property of it makes RabbitMQ
    refuse it, let it expire or send it elsewhere.
    """
    monkeypatch.setattr(dead_letters, "can_keep", lambda: False)
    broker = place("rabbitmq")
    event = paid("u", type="order.lost")
    headers, body = event.to_http()
    del headers["content-type"]
    properties = {"expiration": 60, "type": "order.lost", "message_id": "m-1"}
    more = {"CC": [broker.place], "nested": {"a": [1]}, "number": 7}
    broker.publish_raw(body, {**headers, **more}, "text/plain", **properties)
    broker.drain(
        Billing().consumer,
        lambda: broker.ready(broker.dead_letter) == 1,
        dead_letter=broker.dead_letter,
    )
    [dead] = broker.dead_messages()
    assert (bytes(dead.body), dead.content_type) == (body, "text/plain")
    kept = {name: value for name, value in dead.headers.items() if name in {*headers, "number"}}
    assert kept == {**headers, "number": 7}
    assert "order.lost" in dead.headers["dead-letter-reason"]
    assert dead.properties["message_id"] == "m-1"
    assert "expiration" not in dead.properties
    assert broker.left() == 0


@pytest.mark.parametrize("compress", [zlib.compress, bz2.compress, lzma.compress])
def test_compressed(place: Any, compress: Any) -> None:
    """RabbitMQ's compressed messages are inflated up to the limit; one byte more is set aside as it
    came, and so is one whose end is missing.
    """
    name = {zlib.compress: "gzip", bz2.compress: "bzip2", lzma.compress: "lzma"}[compress]
    billing, broker = Billing(), place("rabbitmq")
    fits = paid("fits", data={"filler": "x" * 10_000}).to_json().encode()
    larger = compress(fits + b" ")
    for body in (compress(fits), larger, compress(fits)[:-1]):
        broker.publish_raw(body, {"compression": name}, "application/cloudevents+json")
    kept = InboxMessage.objects.order_by("pk")
    until = lambda: len(effect_counts()) + kept.count() == 3  # noqa: E731
    broker.drain(billing.consumer, until, max_body_bytes=len(fits))
    assert effect_counts() == {"fits": 1}
    assert bytes(kept[0].body) == larger
    assert "more than" in kept[0].error
    assert "compression='" in kept[1].error
    assert ["compression", name] in json.loads(kept[0].headers)


def test_a_message_that_would_fill_the_memory(place: Any) -> None:
    """A small message that would inflate to 2 GiB takes next to no memory, and is set aside."""
    billing, broker = Billing(), place("rabbitmq")
    inflate, peaks = zlib.compressobj(9), []
    bomb = b"".join(inflate.compress(bytes(2**20)) for _ in range(2**11)) + inflate.flush()
    broker.publish_raw(bomb, {"compression": "gzip"}, "application/json")
    tracemalloc.start()
    try:
        broker.drain(billing.consumer, lambda: bool(dead()))
        peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert bytes(InboxMessage.objects.get().body) == bomb
    assert peaks[0] < 2**27


def test_too_large(broker: Broker) -> None:
    """A message whose body is larger than the limit is set aside unread, at every broker."""
    billing = Billing()
    fits = paid("a")
    broker.publish(paid("large", data={"filler": "x" * 10_000}), fits)
    until = lambda: bool(effect_counts()) and bool(dead())  # noqa: E731
    broker.drain(billing.consumer, until, max_body_bytes=len(fits.to_json()))
    assert effect_counts() == {"a": 1}
    assert "max_body_bytes" in InboxMessage.objects.get().error
    assert broker.left() == 0


NOT_UTF8 = b"\xff\xfe"


def properties(flags: int, block: bytes) -> bytes:
    """The properties of an AMQP message, as they are sent."""
    return flags.to_bytes(2, "big") + block


def short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def table(block: bytes) -> bytes:
    return len(block).to_bytes(4, "big") + block


def nested(levels: int) -> bytes:
    """An array in an array, that many levels deep."""
    value = b"A" + bytes(4)
    for _ in range(levels):
        value = b"A" + len(value).to_bytes(4, "big") + value
    return value


UNREADABLE = {
    "a header's name": properties(0x2000, table(short(NOT_UTF8) + b"t\x01")),
    "a name in a table": properties(
        0x2000, table(short(b"a") + b"F" + table(short(NOT_UTF8) + b"t\x01"))
    ),
    "message_id": properties(0x0080, short(NOT_UTF8)),
    "type": properties(0x0020, short(NOT_UTF8)),
    "content_type": properties(0x8000, short(NOT_UTF8)),
    "a time that is none": properties(0x2000, table(short(b"a") + b"T" + b"\x7f" * 8)),
    "nesting": properties(0x2000, table(short(b"a") + nested(2000))),
}


@pytest.mark.parametrize("which", UNREADABLE)
@pytest.mark.parametrize("body", [b"", b"{}" * 100_000], ids=["empty", "long"])
def test_properties_that_cannot_be_read(place: Any, which: str, body: bytes) -> None:
    """A message of a foreign sender whose properties cannot be read is set aside, with all that
    came; it does not end the consumer.
    """
    billing, broker = Billing(), place("rabbitmq")
    broker.publish(paid("a"))
    broker.publish_frames(UNREADABLE[which], body)
    broker.publish(paid("b"))
    broker.drain(billing.consumer, lambda: len(effect_counts()) == 2 and bool(dead()))
    assert effect_counts() == {"a": 1, "b": 1}
    assert broker.left() == 0
    kept = InboxMessage.objects.get()
    assert bytes(kept.body) == body
    # Some versions of py-amqp leave a header's name as bytes.
    assert "cannot be decoded" in kept.error or ("name" in which and "not JSON" in kept.error)


@pytest.mark.parametrize("levels", [10, 300, 700, 900, 950])
def test_nested_headers(place: Any, levels: int) -> None:
    """However deep a header is nested, its message is handled or set aside."""
    billing, broker = Billing(), place("rabbitmq")
    broker.publish_frames(
        properties(0x2000, table(short(b"a") + nested(levels))), paid("a").to_json().encode()
    )
    broker.publish(paid("b"))
    until = lambda: len(effect_counts()) + len(dead()) == 2  # noqa: E731
    broker.drain(billing.consumer, until)
    assert effect_counts()["b"] == 1
    assert broker.left() == 0


@pytest.mark.parametrize("which", UNREADABLE)
def test_dead_letters_that_cannot_be_read(
    place: Any, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a message is a dead letter like others where there is no table to dead-letter it in."""
    monkeypatch.setattr(dead_letters, "can_keep", lambda: False)
    billing, broker = Billing(), place("rabbitmq")
    broker.publish_frames(UNREADABLE[which], MALFORMED)
    broker.publish(paid("b"))
    name = broker.dead_letter
    over = lambda: bool(effect_counts()) and broker.ready(name) == 1  # noqa: E731
    broker.drain(billing.consumer, over, dead_letter=name)
    [dead] = broker.dead_messages()
    assert bytes(dead.body) == MALFORMED
    assert broker.left() == 0
    if "cannot be decoded" in dead.headers["dead-letter-reason"]:
        raw = dead.headers["idempotency-unreadable"]
        raw = raw.encode() if isinstance(raw, str) else bytes(raw)
        assert UNREADABLE[which].startswith(raw)
