from __future__ import annotations

from collections.abc import Iterator

import pytest

from .brokers import Broker, kafka_broker, kombu_broker

BROKERS = ("rabbitmq", "redis", "kafka", "sqs", "sqs.fifo")


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """Each broker, with a queue of its own."""
    kind: str = request.param
    if kind == "kafka":
        made = kafka_broker(request.getfixturevalue("kafka"))
    elif kind.startswith("sqs"):
        made = kombu_broker(request.getfixturevalue("sqs_server"), kind.removeprefix("sqs"))
    else:
        server = "rabbit" if kind == "rabbitmq" else "redis_server"
        made = kombu_broker(request.getfixturevalue(server))
    with made as broker:
        yield broker
