"""Filters on a Redis or Valkey, which all processes share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import Any

from ...redis.server import ConnectionFactory, RedisServer
from . import SeenFilter


class RedisSet(SeenFilter):
    """Remembers each event for a time, in some 100 bytes: exact, as long as nothing is evicted.

    All processes share it, on a Redis or Valkey. It takes one round trip however many events are
    asked for.

    Args:
        ttl: how long an event is remembered; no longer than its consumer remembers it.
        cache: the alias of a django-redis cache in ``CACHES``.
        name: what the names of the keys begin with.
        connection_factory: as for :class:`~idempotency_django.contrib.redis.RedisStore`, instead of
            the cache.

    Raises:
        ValueError: the time is below a second.
    """

    def __init__(
        self,
        ttl: timedelta,
        *,
        cache: str = "default",
        name: str = "seen",
        connection_factory: ConnectionFactory = None,
    ) -> None:
        if ttl < timedelta(seconds=1):
            raise ValueError(f"A filter got ttl={ttl}. Use a second or more.")
        self.seconds = int(ttl.total_seconds())
        self.name = name
        self._server = RedisServer(cache, connection_factory)

    def contains(self, ids: Sequence[str]) -> Sequence[bool]:
        return [bool(each) for each in self._sent([("EXISTS", key) for key in self._keys(ids)])]

    def add(self, ids: Sequence[str]) -> None:
        self._sent([("SET", key, "", "NX", "EX", self.seconds) for key in self._keys(ids)])

    def _keys(self, ids: Sequence[str]) -> list[str]:
        # Two ids with one digest would cost a look-up, and no more.
        digests = [blake2b(each.encode(), digest_size=16).hexdigest() for each in ids]
        return [self._server.name(f"{self.name}:{digest}") for digest in digests]

    def _sent(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        pipeline: Any = self._server.client().pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(pipeline.execute())


class RedisBloom(RedisSet):
    """Remembers events in some 2 bytes each, on a server with the commands ``BF.*``.

    Those are Redis from version 8, Redis Stack, and Valkey with its module. A new filter begins
    each time that ``ttl`` has passed, and the one before it is kept for as long again.

    Args:
        capacity: how many events are expected within ``ttl``. The filter grows if there are more.
        ttl: an event is remembered for at least this long, and for at most twice as long.
        error: the share of new events that it takes for seen, for which the store is asked in vain.
        cache: as for :class:`RedisSet`.
        name: as for :class:`RedisSet`. Give filters of different sizes different ones.
        connection_factory: as for :class:`RedisSet`.
    """

    def __init__(
        self,
        capacity: int,
        *,
        ttl: timedelta = timedelta(days=1),
        error: float = 0.001,
        **options: Any,
    ) -> None:
        super().__init__(ttl, **options)
        self.capacity, self.error = capacity, error

    def contains(self, ids: Sequence[str]) -> Sequence[bool]:
        newest, oldest = self._sent([("BF.MEXISTS", key, *ids) for key in self._filters()])
        return [any(each) for each in zip(newest, oldest, strict=True)]

    def add(self, ids: Sequence[str]) -> None:
        newest = self._filters()[0]
        size = ("CAPACITY", self.capacity, "ERROR", self.error)
        self._sent(
            [("BF.INSERT", newest, *size, "ITEMS", *ids), ("EXPIRE", newest, 2 * self.seconds)]
        )

    def _filters(self) -> list[str]:
        """The keys of the newest filter and of the one before it."""
        period = int(time.time() // self.seconds)
        return [self._server.name(f"{self.name}:{each}") for each in (period, period - 1)]
