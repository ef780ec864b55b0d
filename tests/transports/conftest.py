"""A place of its own at each broker for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.transports import brokers
from tests.transports.brokers import Broker

SERVERS = {"kafka": "kafka", "rabbitmq": "rabbit", "sqs": "sqs_server"}
CLASSES = {"kafka": brokers.Kafka, "rabbitmq": brokers.RabbitMQ, "sqs": brokers.SQS}


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Callable[..., Broker]]:
    """Makes places at a broker, by the name of its transport."""
    made: list[Broker] = []

    def make(transport: str, **options: object) -> Broker:
        server = request.getfixturevalue(SERVERS[transport])
        made.append(CLASSES[transport](server, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(params=list(SERVERS))
def broker(request: pytest.FixtureRequest, place: Callable[..., Broker]) -> Broker:
    """A place at each of the brokers."""
    return place(request.param)
