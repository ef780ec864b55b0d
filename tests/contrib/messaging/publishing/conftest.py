from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contrib.messaging.brokers import Broker

BROKERS = {
    "rabbitmq": {},
    "redis": {},
    "kafka": {"partitions": 2},
    "sqs": {},
    "sqs.fifo": {"suffix": ".fifo"},
}


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, place: Callable[..., Broker]) -> Broker:
    """A place at each broker."""
    return place(request.param.removesuffix(".fifo"), **BROKERS[request.param])
