"""A place of its own at each broker for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from idempotency_django.backoff import Backoff
from idempotency_django.contrib.messaging.brokers import loop
from tests.contrib.messaging.transports import brokers
from tests.contrib.messaging.transports.brokers import Broker

SERVERS = {
    "kafka": "kafka",
    "rabbitmq": "rabbit",
    "redis": "redis_server",
    "sqs": "sqs_server",
}
CLASSES = {
    "kafka": brokers.Kafka,
    "rabbitmq": brokers.RabbitMQ,
    "redis": brokers.Redis,
    "sqs": brokers.SQS,
}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for long."""
    moment = timedelta(seconds=0.02)
    monkeypatch.setattr(loop, "BACKOFF", Backoff(moment, moment))


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Callable[..., Broker]]:
    """Makes places at a broker, by its name."""
    made: list[Broker] = []

    def make(name: str, **options: object) -> Broker:
        server = request.getfixturevalue(SERVERS[name])
        made.append(CLASSES[name](server, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(params=list(SERVERS))
def broker(request: pytest.FixtureRequest, place: Callable[..., Broker]) -> Broker:
    """A place at each of the brokers."""
    return place(request.param)
