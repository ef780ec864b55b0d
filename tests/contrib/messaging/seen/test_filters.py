"""What the filters remember, and when they forget."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from redis import Redis
from time_machine import travel

from idempotency_django.contrib.messaging import RedisBloom, RedisSet
from tests.support.redis_servers import client, url, valkey_at
from tests.support.servers import free_port

from .conftest import DAY, Failing, Made


def ids(*numbers: int) -> list[str]:
    return [f"e-{number} consumer:clicks:/shop" for number in numbers]


def test_remembers(made: Made) -> None:
    """What was added may be there, and what was not is not, in the order of the question."""
    filter_ = made()
    assert [*filter_.may_contain(ids(1, 2))] == [False, False]
    filter_.remember(ids(2, 3))
    filter_.remember(ids(3))
    filter_.remember([])
    assert [*filter_.may_contain(ids(3, 1, 2))] == [True, False, True]


class TestBloomOnAServer:
    def bloom(self, server: Redis, **options: Any) -> RedisBloom:
        given = {"capacity": 10, "error": 0.0001, "connection_factory": lambda: server}
        return RedisBloom(**(given | options))  # type: ignore[arg-type]

    def test_forgets(self, server: Redis) -> None:
        """An event is known for its time, and forgotten after twice that, as its key is."""
        bloom = self.bloom(server)
        with travel(datetime(2031, 5, 7, tzinfo=UTC), tick=False) as clock:
            bloom.remember(ids(1))
            [key] = server.keys("seen:*")
            assert DAY.total_seconds() < server.ttl(key) <= 2 * DAY.total_seconds()
            for known in (True, True, False):
                assert [*self.bloom(server).may_contain(ids(1))] == [known]
                clock.shift(DAY)

    def test_commands(self, server: Redis) -> None:
        """A batch takes as many commands as one event."""
        bloom = self.bloom(server, capacity=1000)
        bloom.remember(ids(0))
        sent = []
        for batch in (ids(1), ids(*range(2, 500))):
            before = server.info("stats")["total_commands_processed"]
            bloom.may_contain(batch)
            bloom.remember(batch)
            sent.append(server.info("stats")["total_commands_processed"] - before)
        assert sent == [5, 5]  # the INFO is one of them

    def test_without_the_module(self, caplog: pytest.LogCaptureFixture) -> None:
        """On a server without BF.*, the store is asked for each event, and the log says why."""
        port = free_port()
        with valkey_at(port), caplog.at_level(logging.WARNING):
            bloom = RedisBloom(10, connection_factory=lambda: client(port))
            assert [*bloom.may_contain(ids(1, 2))] == [True, True]
        [record] = caplog.records
        assert "filter of seen events" in record.getMessage()
        assert "failed" in record.getMessage()
        assert "unknown command" in str(caplog.text)


class TestSet:
    def test_expires(self, server: Redis) -> None:
        """Each id is kept for as long as it says, in a key that is as the cache names it."""
        cache = {"BACKEND": "django_redis.cache.RedisCache", "KEY_PREFIX": "shop"}
        cache["LOCATION"] = url(server.connection_pool.connection_kwargs["port"])
        with override_settings(CACHES={"default": cache}):
            RedisSet(DAY, name="clicks").remember(ids(1))
        [key] = server.keys("*")
        assert key.startswith(b"shop:1:clicks:")
        assert 0 < server.ttl(key) <= DAY.total_seconds()


class TestFaults:
    def test_maybe(self, caplog: pytest.LogCaptureFixture) -> None:
        """After a fault each id may be there, and the filter is left alone for a while."""
        failing = Failing(verdict=False)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert [*failing.may_contain(ids(1, 2))] == [True, True]
                failing.remember(ids(1))
        assert (failing.asked, failing.told, len(caplog.records)) == (1, [], 1)

    def test_gone(self) -> None:
        """A server that is not there is a fault."""
        filter_ = RedisSet(DAY, connection_factory=lambda: client(free_port()))
        assert [*filter_.may_contain(ids(1))] == [True]

    def test_no_cache(self) -> None:
        """A cache that does not exist is a mistake, and says so."""
        with pytest.raises(ImproperlyConfigured, match="'nowhere' doesn't exist"):
            RedisSet(DAY, cache="nowhere").may_contain(ids(1))


def test_no_time() -> None:
    """A filter that remembers nothing is refused."""
    with pytest.raises(ValueError, match="a second or more"):
        RedisSet(timedelta(0))
