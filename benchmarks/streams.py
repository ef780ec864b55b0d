"""Streams and filters: what one message adds to a bare transaction."""

# the page says × and ≤
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Final
from uuid import uuid4

from django.db import transaction

from benchmarks.models import Order
from benchmarks.report import Section, Table, Target
from benchmarks.timing import Block, Measured, Sample, interleave
from idempotency_django.contrib.messaging import (
    Consumer,
    Event,
    SeenFilter,
    claim_stream,
)

MOST: Final = 1.2  # times the bare transaction

BARE: Final = "one `INSERT` in `atomic()`, unprotected"
ADVANCE: Final = "… in `stream.advance()`"
SKIPPED: Final = "`stream.is_new()`, a duplicate"
CLAIM: Final = "`claim_stream()`"
HANDLE: Final = "… in `Consumer.handle()`"
FILTERED: Final = "… in `Consumer.handle()`, with a filter"
AGAIN: Final = "`Consumer.handle()`, a duplicate"
FILTERED_AGAIN: Final = "`Consumer.handle()`, a duplicate, with a filter"

TEXT: Final = """\
The transaction creates one row. Times are for one message without a broker, in {rounds} interleaved
rounds of {calls} messages. The filter is in the process."""

_numbers = count()


class Remembering(SeenFilter):
    """Remembers exactly, in this process."""

    def __init__(self) -> None:
        self.ids: set[str] = set()

    def contains(self, ids: Sequence[str]) -> Sequence[bool]:
        return [each in self.ids for each in ids]

    def add(self, ids: Sequence[str]) -> None:
        self.ids.update(ids)


def measure(rounds: int, calls: int) -> Section:
    """Compare what a message costs in each of the ways to know it again."""
    measured = interleave(_blocks(calls), rounds)
    table = Table(["", "ms", "× unprotected"])
    for name, series in measured.items():
        table.add(name, f"{series.wall.milliseconds:.3f}", series.wall.over(measured[BARE].wall))
    details = [TEXT.format(rounds=rounds, calls=calls), table]
    return Section("Streams and filters", [], _targets(measured), details=details)


def _targets(measured: dict[str, Measured]) -> list[Target]:
    advanced = measured[ADVANCE].wall.over(measured[BARE].wall).value
    faster = measured[FILTERED_AGAIN].wall.over(measured[AGAIN].wall).value
    return [
        Target(
            f"a message of a stream: {advanced:.2f} ≤ {MOST} × the bare transaction",
            advanced <= MOST,
        ),
        Target(f"a duplicate with a filter: {faster:.2f} ≤ 1 × one without", faster <= 1),
    ]


def _blocks(calls: int) -> dict[str, Block]:
    stream = claim_stream(f"{uuid4()}")

    def bare() -> None:
        with transaction.atomic():
            _effect()

    def advance() -> None:
        with stream.advance(to=stream.position + 1):
            _effect()

    plain, filtered = _consumer(None), _consumer(Remembering())
    handled = _events(calls)
    for event in handled:
        plain.handle(event)
        filtered.handle(event)
    return {
        BARE: lambda: _each(bare, calls),
        ADVANCE: lambda: _each(advance, calls),
        SKIPPED: lambda: _each(lambda: stream.is_new(0), calls),
        CLAIM: lambda: _each(lambda: claim_stream("claimed"), calls),
        HANDLE: lambda: _handled(plain, _events(calls)),
        FILTERED: lambda: _handled(filtered, _events(calls)),
        AGAIN: lambda: _handled(plain, handled),
        FILTERED_AGAIN: lambda: _handled(filtered, handled),
    }


def _effect() -> None:
    Order.objects.create(reference=f"s{next(_numbers)}", amount=500, currency="EUR")


def _consumer(seen: SeenFilter | None) -> Consumer:
    consumer = Consumer(f"benchmark-{'filtered' if seen else 'plain'}", seen=seen)
    consumer.on("order.paid")(lambda event, execution: _effect())
    return consumer


def _events(number: int) -> list[Event]:
    return [Event(id=f"{uuid4()}", source="/shop", type="order.paid") for _ in range(number)]


def _each(function: Callable[[], Any], calls: int) -> Iterator[Sample]:
    for _ in range(calls):
        started = time.perf_counter()
        function()
        yield Sample(time.perf_counter() - started)


def _handled(consumer: Consumer, events: list[Event]) -> Iterator[Sample]:
    for event in events:
        started = time.perf_counter()
        consumer.handle(event)
        yield Sample(time.perf_counter() - started)
