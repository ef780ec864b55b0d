"""A real RabbitMQ: what is acknowledged is committed, and what is not comes again."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from kombu import Connection, Producer, Queue

from idempotency_django.contrib.messaging import Event
from idempotency_django.models import IdempotencyKey
from tests.support.nightly import first_database, nightly, sizes
from tests.support.outside import ROOT, environment
from tests.support.servers import Server
from tests.support.shared import effect_counts

from .worker import MOMENTS, Orders, dead_of, queue_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.django_db(transaction=True, databases="__all__"),
]

LONGEST = 600  # seconds
SEED = int(os.environ.get("CONSUMER_SEED", "1"))

every_database = pytest.mark.parametrize("name", list(settings.ALIASES))


class Broker:
    """An exchange of its own, with the queues of consumers at it."""

    def __init__(self, url: str, log: Path, consumers: list[str]) -> None:
        self.log = log
        self.orders = Orders(url, uuid.uuid4().hex, consumers, str(log))
        self._connection = Connection(url)
        self._channel = self._connection.channel()
        for name in consumers:
            queue_of(self.orders, name)(self._channel).declare()
            self._dead(name).declare()

    def publish(self, *events: Event) -> None:
        """Publish the events, in this order; all are at the broker when this returns."""
        producer = Producer(self._channel, exchange=queue_of(self.orders, "").exchange)
        for event in events:
            producer.publish(event.to_json(), content_type="application/cloudevents+json")
        self.left()

    def left(self) -> int:
        """How many messages wait in the queues."""
        queues = [queue_of(self.orders, name) for name in self.orders.consumers]
        return sum(
            queue(self._channel).queue_declare(passive=True).message_count for queue in queues
        )

    def dead(self, name: str) -> list[Event]:
        """What a consumer has rejected."""
        events = []
        while message := self._dead(name).get(no_ack=True):
            events.append(Event.from_json(message.body))
        return events

    def consume(self, name: str, *, lease: float = 2, **orders: Any) -> list[str]:
        """Have processes consume until nothing is left; who was killed where."""
        env = environment(settings.ALIASES[name], LEASE_SECONDS=str(lease))
        told = json.dumps(asdict(replace(self.orders, **orders)))
        command = [sys.executable, "-m", "tests.contrib.messaging.consuming.worker", told]
        while True:
            subprocess.run(command, check=True, cwd=ROOT, env=env, timeout=LONGEST)
            if not self.left():  # what a process held that was killed last has come back
                return self.log.read_text().splitlines() if self.log.exists() else []

    def close(self) -> None:
        """Leave nothing behind."""
        for name in self.orders.consumers:
            queue_of(self.orders, name)(self._channel).delete()
            self._dead(name).delete()
        self._connection.release()

    def _dead(self, name: str) -> Queue:
        return Queue(dead_of(self.orders, name), durable=False)(self._channel)


@pytest.fixture
def broker(rabbit: Server, tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Makes brokers with the queues of these consumers."""
    made: list[Broker] = []

    def make(*consumers: str) -> Broker:
        made.append(Broker(rabbit.url, tmp_path / "killed", list(consumers)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def paid(number: str, source: str = "/shop", **data: Any) -> Event:
    """An event, as its sender makes it."""
    return Event(id=number, source=source, type="order.paid", data=data)


@pytest.mark.parametrize(
    ("name", "batches"), [*((name, 0) for name in settings.ALIASES), nightly("postgres", 1)]
)
def test_killed(broker: Callable[..., Broker], name: str, batches: int) -> None:
    """Killed at any moment, up to the one between commit and acknowledgement: one effect."""
    if name not in settings.ALIASES:
        pytest.skip("PostgreSQL is not among TEST_DATABASES")
    queue = broker("billing")
    strikes = [paid(f"{at}", strike=moment) for at, moment in enumerate(MOMENTS)]
    queue.publish(paid("a"), *strikes, paid("b"))
    killed = queue.consume(name, batches=batches)
    assert killed == [f"{moment}: {at}" for at, moment in enumerate(MOMENTS)]
    assert effect_counts(settings.ALIASES[name]) == {f"billing /shop {each}": 1 for each in "a012b"}


@first_database("name", indirect=False)
def test_poison_that_kills(broker: Callable[..., Broker], name: str) -> None:
    """What ends each process that handles it is counted, dead-lettered, and kept by the broker."""
    queue = broker("billing")
    queue.publish(paid("a"), paid("deadly", kills=True), paid("b"))
    killed = queue.consume(name, lease=1, max_attempts=2)
    # The first time nobody can count it: that process had no reason to expect anything.
    assert killed == ["poison: deadly"] * 3
    assert effect_counts(settings.ALIASES[name]) == {
        "billing /shop a": 1,
        "billing /shop b": 1,
    }
    assert [event.id for event in queue.dead("billing")] == ["deadly"]
    held = IdempotencyKey.objects.using(settings.ALIASES[name]).held()
    assert [row.key for row in held] == ["deadly"]


@pytest.mark.parametrize("messages", sizes(48, 240, "CONSUMER_MESSAGES"))
@every_database
def test_storm(broker: Callable[..., Broker], name: str, messages: int) -> None:
    """Each message delivered one to five times, in random order, to processes killed at random.

    There is one effect for each consumer, source and id, and nothing is dead that is not poison.
    """
    number = messages if name == "postgres" else messages // 8
    chance = random.Random(SEED)
    poison = set(chance.sample(range(number), max(1, number // 100)))
    events = [
        paid(f"{at // 2}", f"/shop/{at % 2}", **({"poison": True} if at in poison else {}))
        for at in range(number)
    ]
    copies = [event for event in events for _ in range(chance.randint(1, 5))]
    chance.shuffle(copies)
    queue = broker("billing", "shipping")
    queue.publish(*copies)
    queue.consume(name, processes=4, batches=2, kills=max(8, number // 50), seed=SEED)

    assert effect_counts(settings.ALIASES[name]) == {
        f"{consumer} {event.source} {event.id}": 1
        for consumer in ("billing", "shipping")
        for event in events
        if not event.data
    }
    wanted = {
        (f"consumer:{consumer}:{events[at].source}", events[at].id)
        for consumer in ("billing", "shipping")
        for at in poison
    }
    held = IdempotencyKey.objects.using(settings.ALIASES[name]).held()
    assert {(row.scope, row.key) for row in held} == wanted
    for consumer in ("billing", "shipping"):
        assert all(event.data for event in queue.dead(consumer))
