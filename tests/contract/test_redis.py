"""The store contract, over the Redis store."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from django_redis import get_redis_connection

from idempotency_django.contrib.redis import RedisStore
from idempotency_django.stores.records import Operation
from idempotency_django.testing import RESPONSE, an_operation
from idempotency_django.testing.contract import as_record
from tests.contract import clocks
from tests.contract.batches import BatchesContract
from tests.support.servers import Server


class TestRedisStore(BatchesContract):
    """The Redis store on Valkey, which forgets by itself what is expired."""

    forgets_expired = True

    SHORT: ClassVar = timedelta(minutes=5)
    LONG: ClassVar = timedelta(hours=1)

    @pytest.fixture(autouse=True)
    def _store(self, redis_server: Server, settings: Any) -> Iterator[None]:
        cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": redis_server.url}
        settings.CACHES = {"default": cache}
        self.store = RedisStore("redis")
        yield
        get_redis_connection("default").connection_pool.disconnect()

    def test_replay_starts_a_new_lifetime(self) -> None:
        """With ``extend_on_replay`` the time to live counts from the last use."""
        operation = an_operation(ttl=self.SHORT)
        longer = an_operation(key=operation.key, ttl=self.LONG, extend_on_replay=True)
        self.completed(operation)
        self.store.record_replay(self.record(operation), longer)
        self._outlives(operation)

    def test_acquire_starts_a_new_lifetime(self) -> None:
        """With ``extend_on_replay`` looking at it is the last use already."""
        operation = an_operation(ttl=self.SHORT)
        longer = an_operation(
            key=operation.key, ttl=self.LONG, extend_on_replay=True, count_replays=False
        )
        self.completed(operation)
        found = as_record(self.store.acquire(longer))
        assert found.counted
        self._outlives(operation)

    def _outlives(self, operation: Operation) -> None:
        """It is still there when one of the same age, without a new lifetime, is not."""
        short = an_operation(ttl=self.SHORT)
        self.completed(short)
        for each in (operation, short):
            clocks.redis(self.store, each.key, 2 * self.SHORT.total_seconds())
        assert self.store.get(short.key, short.scope) is None
        assert self.record(operation).payload == RESPONSE
        assert not self.record(operation).expired
