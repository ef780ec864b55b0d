"""A consumer of messages, beside the one of django-outbox-pattern: what a message costs."""

# the page says × and ≤
from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final
from uuid import uuid4

from django.db import transaction
from django_outbox_pattern.consumers import Consumer as PeerConsumer
from django_outbox_pattern.payloads import Payload

from benchmarks.models import Order
from benchmarks.report import Section, Table, Target
from benchmarks.timing import Block, Measured, Sample, interleave
from idempotency_django.contrib.messaging import Consumer, Event
from idempotency_django.engine.context import ExecutionContext

BATCH: Final = 100
MOST: Final = 2.1  # times the bare transaction, for one message
LEAST: Final = 5.0  # times as many messages in a second, in batches

BARE: Final = "the handler in `atomic()`, unprotected"
ALONE: Final = "`handle()`"
AGAIN: Final = "`handle()`, a duplicate"
REDELIVERED: Final = "`handle(redelivered=True)`"
MANY: Final = f"`handle_many()`, {BATCH} events"
MANY_AGAIN: Final = f"`handle_many()`, {BATCH} duplicates"
PEER: Final = "django-outbox-pattern"
PEER_AGAIN: Final = "django-outbox-pattern, a duplicate"

TEXT: Final = """\
The handler creates one row. Times are for one message, without a broker, in {rounds} interleaved
rounds of {calls} messages. django-outbox-pattern is set up as its documentation says."""

consumer = Consumer("benchmark")


@consumer.on("order.paid")
def book(event: Event, execution: ExecutionContext) -> dict[str, Any]:
    """What is to be done once for a message."""
    return {"order": Order.objects.create(**event.data).pk}


def measure(rounds: int, calls: int) -> Section:
    """Compare what a message costs in each of the ways to handle it."""
    measured = interleave(_blocks(calls), rounds)
    table = Table(["", "ms", "× unprotected"])
    for name, series in measured.items():
        ratio = series.wall.over(measured[BARE].wall)
        table.add(name, f"{series.wall.milliseconds:.3f}", ratio)
    parts = [TEXT.format(rounds=rounds, calls=calls), table]
    return Section("Consumers of messages", parts, _targets(measured))


def _targets(measured: dict[str, Measured]) -> list[Target]:
    single = measured[ALONE].wall.over(measured[BARE].wall).value
    faster = measured[ALONE].wall.over(measured[MANY].wall).value
    return [
        Target(f"one message: {single:.2f} ≤ {MOST} × the bare transaction", single <= MOST),
        Target(f"{BATCH} at a time: {faster:.1f} ≥ {LEAST:.0f} × the rate", faster >= LEAST),
    ]


def _blocks(calls: int) -> dict[str, Block]:
    def bare(event: Event) -> None:
        with transaction.atomic():
            Order.objects.create(**event.data)

    def redelivered(event: Event) -> None:
        consumer.handle(event, redelivered=True)

    peer = _peer()
    handled, handled_together = _events(calls), _events(BATCH)
    for event in handled:
        consumer.handle(event)
        peer(event)
    consumer.handle_many(handled_together)
    batches = max(1, calls // BATCH)
    return {
        BARE: lambda: _each(bare, _events(calls)),
        ALONE: lambda: _each(consumer.handle, _events(calls)),
        AGAIN: lambda: _each(consumer.handle, handled),
        REDELIVERED: lambda: _each(redelivered, _events(calls)),
        MANY: lambda: _together([_events(BATCH) for _ in range(batches)]),
        MANY_AGAIN: lambda: _together([handled_together] * batches),
        PEER: lambda: _each(peer, _events(calls)),
        PEER_AGAIN: lambda: _each(peer, handled),
    }


_numbers = count()


def _events(number: int) -> list[Event]:
    return [
        Event(
            id=str(uuid4()),
            source="/shop",
            type="order.paid",
            data={"reference": f"m{next(_numbers)}", "amount": 500, "currency": "EUR"},
        )
        for _ in range(number)
    ]


def _each(handle: Callable[[Event], object], events: list[Event]) -> Iterator[Sample]:
    for event in events:
        started = time.perf_counter()
        handle(event)
        yield Sample(time.perf_counter() - started)


def _together(batches: list[list[Event]]) -> Iterator[Sample]:
    for events in batches:
        started = time.perf_counter()
        consumer.handle_many(events)
        yield Sample((time.perf_counter() - started) / len(events))


class _Broker:
    """Takes what the peer's consumer says to a broker."""

    def set_listener(self, *_: object) -> None:
        """Nothing comes."""

    def ack(self, *_: object, **__: object) -> None:
        """The message is done."""


def _peer() -> Callable[[Event], None]:
    consumer = PeerConsumer(_Broker(), "", "")

    def book(payload: Payload) -> None:
        with transaction.atomic():
            Order.objects.create(**payload.body["data"])
            payload.save()

    consumer.callback = book

    def handle(event: Event) -> None:
        headers = {"dop-msg-id": event.id, "message-id": event.id, "ack": "1", "subscription": "1"}
        consumer.message_handler(json.dumps({"data": event.data}), headers)

    return handle
