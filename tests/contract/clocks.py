"""How time passes for each store without waiting: all it knows of a key moves into the past."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.core.cache import caches
from django.core.cache.backends.locmem import LocMemCache
from django.db.models import F
from django_redis import get_redis_connection

from idempotency_django.contrib import cached as cached_store
from idempotency_django.contrib.cached import CachedStore
from idempotency_django.contrib.redis import RedisStore
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import Store
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from tests.contract.machine import SCOPES, UNIT

_TIMES = ("created_at", "completed_at", "lease_expires_at", "expires_at", "purge_at")

# Where a time is in the past then, the server forgets the key at once.
_REDIS = """
if redis.call('EXISTS', KEYS[1]) == 0 then return end
for _, name in ipairs({'lease', 'expires', 'created', 'completed', 'last_replayed'}) do
  local time = redis.call('HGET', KEYS[1], name)
  if time and time ~= '' then
    redis.call('HSET', KEYS[1], name, string.format('%.0f', tonumber(time) - ARGV[1]))
  end
end
local left = redis.call('PTTL', KEYS[1])
if left >= 0 then redis.call('PEXPIRE', KEYS[1], string.format('%.0f', left - ARGV[1])) end
"""


class Clock:
    """Stands for the module ``time`` where a store measures how long something took."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        """What the true one says, and what has been added to it."""
        return time.monotonic() + self.ahead


def memory(store: Store, key: str, seconds: float) -> None:
    """In the entries themselves."""
    assert isinstance(store, MemoryStore)
    for (name, _), entry in store._entries.items():
        if name == key:
            entry.started -= seconds
            if entry.lease_ends is not None:
                entry.lease_ends -= seconds


def without_row(store: Store, key: str) -> None:
    """Delete the rows alone, in one statement; a step is nothing without its row."""
    IdempotencyKey.objects.using(store.using).filter(key=key)._raw_delete(store.using)


def redis(store: Store, key: str, seconds: float) -> None:
    """In the hashes, and in when the server will forget them."""
    assert isinstance(store, RedisStore)
    server = get_redis_connection("default")
    for scope in SCOPES:
        server.eval(_REDIS, 1, store.redis_key(key, scope), str(int(seconds * 1000)))


class Database:
    """In the rows, and in the clock of the store in front of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(cached_store, "time", self.clock)

    def __call__(self, store: Store, key: str, seconds: float) -> None:
        """Let that much time pass."""
        assert isinstance(store, DatabaseStore)
        earlier = {name: F(name) - timedelta(seconds=seconds) for name in _TIMES}
        IdempotencyKey.objects.using(store.using).filter(key=key).update(**earlier)
        self.clock.ahead += seconds


class Cached(Database):
    """Likewise, and in the cache in this process's memory."""

    def __call__(self, store: Store, key: str, seconds: float) -> None:
        """Let that much time pass."""
        assert isinstance(store, CachedStore)
        super().__call__(store, key, seconds)
        cache = caches[store.cache]
        assert isinstance(cache, LocMemCache)
        if seconds == UNIT:  # a cache may drop anything at any time
            cache.clear()
        for name, ends in cache._expire_info.items():
            if ends is not None:
                cache._expire_info[name] = ends - seconds
