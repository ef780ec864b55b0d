"""Each of the databases, a broker in memory, and a place at each of the real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.conf import settings

from tests.contrib.messaging import brokers
from tests.contrib.messaging.outbox.conftest import Broker, changed_settings, outbox

STORE = "idempotency_django.stores.database.DatabaseStore"
CONSUMED = ("kafka", "rabbitmq", "redis")  # by run_consumer
SERVERS: dict[str, tuple[str, type[Any]]] = {
    "kafka": ("kafka", brokers.Kafka),
    "rabbitmq": ("rabbit", brokers.RabbitMQ),
    "redis": ("redis_server", brokers.Redis),
    "sqs": ("sqs_server", brokers.SQS),
}


@pytest.fixture(params=list(settings.ALIASES))
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    """The alias of each database, in which messages and records are."""
    alias: str = settings.ALIASES[request.param]
    store = {"BACKEND": STORE, "OPTIONS": {"using": alias}}
    with changed_settings(MESSAGING_DATABASE=alias, STORES={"default": store}):
        yield alias


@pytest.fixture
def broker() -> Iterator[type[Broker]]:
    """The broker of the topic ``"orders"``."""
    with pytest.MonkeyPatch.context() as patched, outbox():
        patched.setattr(Broker, "got", [])
        for name in ("refuse", "before"):  # a test may replace them, and no other test sees it
            patched.setattr(Broker, name, staticmethod(lambda _: None))
        yield Broker


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Callable[..., brokers.Broker]]:
    """Makes places at a broker, by its name."""
    made: list[brokers.Broker] = []

    def make(name: str, **options: object) -> brokers.Broker:
        fixture, kind = SERVERS[name]
        made.append(kind(request.getfixturevalue(fixture), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
