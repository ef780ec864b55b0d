"""The outbox: what publishing adds to a transaction, and how many messages a relay sends."""

# the page says × and ≥
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from django.db import connection, connections, transaction
from django_domain_events import event as domain_event
from django_domain_events import fire
from django_outbox_pattern.factories import factory_producer
from django_outbox_pattern.models import Published

from benchmarks.models import Order
from benchmarks.report import Section, Table, Target
from benchmarks.timing import Block, Sample, interleave
from idempotency_django.contrib.messaging import Batch, Publisher, Relay, publish
from idempotency_django.contrib.messaging.models import OutboxMessage

GROUPS: Final = 40
WRITERS: Final = 6
FASTER: Final = 2.0  # times as many messages in a second as django-outbox-pattern's relay
ORDERED: Final = 0.7  # of the transactions in a second that do without an order

BARE: Final = "one `INSERT` in `atomic()`, no message"
PLAIN: Final = "… and `publish()`"
GROUPED: Final = "… and `publish(group=…)`"
PEER: Final = "… and django-outbox-pattern"
DOMAIN: Final = "… and django-domain-events"

RELAY: Final = "the relay"
RELAY_GROUPED: Final = f"the relay, {GROUPS} groups"
RELAY_PEER: Final = "django-outbox-pattern's `publish`"

TEXT: Final = """\
The transaction creates one row. {rounds} interleaved rounds of {calls} transactions each; a relay
then sends {messages} messages to a broker that confirms at once, so that only the work on the
database is measured."""

_numbers = count()


class Nowhere(Publisher):
    """A broker that confirms at once."""

    def publish(self, batch: Batch) -> None:
        for message in batch:
            batch.note(message)


@domain_event
@dataclass(frozen=True, slots=True)
class OrderPaid:
    """The event of django-domain-events."""

    number: int


class _Connection:
    """A broker for django-outbox-pattern that confirms at once."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: True


def measure(rounds: int, calls: int, messages: int) -> Section:
    """Compare what publishing costs, and what relays send in a second."""
    written = interleave({name: _block(calls, tell) for name, tell in _WAYS.items()}, rounds)
    table = Table(["", "ms", "× without a message"])
    for name, each in written.items():
        table.add(name, f"{each.wall.milliseconds:.3f}", each.wall.over(written[BARE].wall))

    producer = factory_producer()
    producer.connection, producer.start, producer.stop = _Connection(), _nothing, _nothing
    relays: dict[str, Block] = {
        RELAY: lambda: _relayed(messages, _plain, lambda: Relay().drain()),
        RELAY_GROUPED: lambda: _relayed(messages, _grouped, lambda: Relay().drain()),
        RELAY_PEER: lambda: _relayed(messages, _peer, producer.publish_message_from_database),
    }
    sent = interleave(relays, max(2, rounds // 4))
    rates = Table(["", "messages a second"])
    for name, each in sent.items():
        rates.add(name, f"{1000 / each.wall.milliseconds:,.0f}")
    faster = sent[RELAY_PEER].wall.over(sent[RELAY].wall).value
    faster_grouped = sent[RELAY_PEER].wall.over(sent[RELAY_GROUPED].wall).value

    share = _share(calls, rounds=max(3, rounds // 4))
    parts = [
        TEXT.format(rounds=rounds, calls=calls, messages=messages),
        table,
        rates,
    ]
    return Section(
        "The outbox",
        parts,
        [
            Target(f"relay: {faster:.1f} ≥ {FASTER:.0f} × django-outbox-pattern", faster >= FASTER),
            Target(
                f"relay in order: {faster_grouped:.1f} ≥ {FASTER:.0f} × django-outbox-pattern",
                faster_grouped >= FASTER,
            ),
            Target(f"writers in order: {share:.2f} ≥ {ORDERED} × unordered", share >= ORDERED),
        ],
    )


def _plain() -> None:
    publish("benchmark", {"number": next(_numbers)}, type="order.paid")


def _grouped() -> None:
    number = next(_numbers)
    publish("benchmark", {"number": number}, type="order.paid", group=f"g{number % GROUPS}")


def _peer() -> None:
    Published.objects.create(destination="/topic/orders", body={"number": next(_numbers)})


_WAYS: Final[dict[str, Callable[[], object]]] = {
    BARE: lambda: None,
    PLAIN: _plain,
    GROUPED: _grouped,
    PEER: _peer,
    DOMAIN: lambda: fire(OrderPaid(next(_numbers))),
}


def _block(calls: int, tell: Callable[[], object]) -> Block:
    def block() -> Iterator[Sample]:
        for _ in range(calls):
            started = time.perf_counter()
            _transaction(tell)
            yield Sample(time.perf_counter() - started)

    return block


def _transaction(tell: Callable[[], object]) -> None:
    with transaction.atomic():
        Order.objects.create(reference=f"o{next(_numbers)}", amount=1, currency="EUR")
        tell()


def _relayed(
    messages: int, tell: Callable[[], object], relay: Callable[[], object]
) -> Iterator[Sample]:
    """How long a relay takes for each message of a backlog."""
    for model in (OutboxMessage, Published):
        model.objects.all().delete()
    with transaction.atomic():
        for _ in range(messages):
            tell()
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")
    started = time.perf_counter()
    relay()
    yield Sample((time.perf_counter() - started) / messages)


def _share(calls: int, rounds: int) -> float:
    """The rate of transactions of several writers in order, over that of writers without."""
    rates = sorted(_rate(calls, _grouped) / _rate(calls, _plain) for _ in range(rounds))
    return rates[len(rates) // 2]


def _rate(calls: int, tell: Callable[[], object]) -> float:
    connections.close_all()
    started = time.perf_counter()
    writers = []
    for place in range(WRITERS):
        writer = os.fork()
        if writer == 0:
            code = 1
            with suppress(BaseException):
                _skip(place * 7)  # each begins with another group
                for _ in range(calls):
                    _transaction(tell)
                code = 0
            os._exit(code)
        writers.append(writer)
    for writer in writers:
        _, status = os.waitpid(writer, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    return WRITERS * calls / (time.perf_counter() - started)


def _skip(numbers: int) -> None:
    for _ in range(numbers):
        next(_numbers)


def _nothing() -> None:
    """Neither connects nor leaves."""
