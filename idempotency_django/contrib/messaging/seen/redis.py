"""Filters on a Redis or Valkey, which all processes share, through a cache of django-redis."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import Any, Final

from ...redis.server import FAULTS, ConnectionFactory, RedisServer
from . import SeenFilter, validate_sizes

ROTATIONS: Final = 3
"""The most retries of a batch of ids if its generation is full or gone."""


class RedisSet(SeenFilter):
    """Remembers each event for a time, in some 100 bytes: exact, as long as nothing is evicted.

    It needs no module of the server, and one round trip however many events are asked for.

    Args:
        ttl: how long an event is remembered; no longer than its consumer remembers it.
        cache: the alias of a django-redis cache in ``CACHES``.
        name: what the names of the keys begin with.
        connection_factory: as for :class:`~idempotency_django.contrib.redis.RedisStore`, instead of
            the cache.

    Raises:
        ValueError: the time is not above 0.
    """

    def __init__(
        self,
        ttl: timedelta,
        *,
        cache: str = "default",
        name: str = "seen",
        connection_factory: ConnectionFactory = None,
    ) -> None:
        if ttl <= timedelta(0):
            raise ValueError(f"A filter got ttl={ttl}. Use a duration above 0.")
        self.seconds = max(1, int(ttl.total_seconds()))
        self.name = name
        self._server = RedisServer(cache, connection_factory)

    def __repr__(self) -> str:
        return f"<RedisSet {self.name!r}>"

    def contains(self, ids: Sequence[str]) -> Sequence[bool]:
        return list(map(bool, self._pipelined([("EXISTS", key) for key in self._keys(ids)])))

    def add(self, ids: Sequence[str]) -> None:
        seconds = str(self.seconds)
        self._pipelined([("SET", key, "", "NX", "EX", seconds) for key in self._keys(ids)])

    def _keys(self, ids: Sequence[str]) -> list[str]:
        # Two ids with one digest would cost a look-up, and no more.
        digests = [blake2b(each.encode(), digest_size=16).hexdigest() for each in ids]
        return [self._server.name(f"{self.name}:{digest}") for digest in digests]

    def _pipelined(self, commands: Sequence[tuple[str, ...]]) -> list[Any]:
        pipeline: Any = self._server.client().pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(pipeline.execute())


class RedisBloom(SeenFilter):
    """Remembers events in some 2 bytes each, on a server with the commands ``BF.*``.

    Those are Redis from version 8, Redis Stack, and Valkey with its module. It takes one round trip
    for each generation, however many events are asked for.

    Args:
        capacity: how many events one generation takes. When it is full, a new one begins, and the
            oldest one is deleted.
        error: the share of new events that it takes for seen, for which the store is asked in vain.
        generations: how many generations are remembered.
        cache: the alias of a django-redis cache in ``CACHES``.
        name: what the names of the keys begin with. Give filters of different sizes different ones.
        connection_factory: as for :class:`~idempotency_django.contrib.redis.RedisStore`, instead of
            the cache.

    Raises:
        ValueError: one of the numbers is out of its range.
    """

    def __init__(
        self,
        capacity: int,
        *,
        error: float = 0.001,
        generations: int = 2,
        cache: str = "default",
        name: str = "seen",
        connection_factory: ConnectionFactory = None,
    ) -> None:
        validate_sizes(capacity, error, generations)
        self.capacity = capacity
        self.error = error / generations  # each of them adds its own
        self.generations = generations
        self.name = name
        self._server = RedisServer(cache, connection_factory)
        self._newest: int | None = None
        """The generation that this process knows; it learns of a newer one when this one is
        full.
        """

    def __repr__(self) -> str:
        return f"<RedisBloom {self.name!r} of {self.capacity}>"

    def contains(self, ids: Sequence[str]) -> Sequence[bool]:
        newest = self._known()
        oldest = max(0, newest + 1 - self.generations)
        found = [
            self._execute("BF.MEXISTS", self._key(number), *ids)
            for number in range(newest, oldest - 1, -1)
        ]
        return [any(each) for each in zip(*found, strict=True)]

    def add(self, ids: Sequence[str]) -> None:
        number, left = self._known(), list(ids)
        for _ in range(ROTATIONS):
            left = self._inserted(number, left)
            if not left:
                return
            number = self._newest = self._rotated(number)

    def _inserted(self, number: int, ids: list[str]) -> list[str]:
        """Add ids to a generation; return the ids that did not fit."""
        try:
            taken = self._execute("BF.INSERT", self._key(number), "NOCREATE", "ITEMS", *ids)
        except FAULTS as error:
            if "not found" in str(error):  # it was deleted or evicted, or never existed
                return ids
            raise
        is_refused = [isinstance(each, Exception) for each in taken]
        return ids[is_refused.index(True) :] if True in is_refused else []  # it is full

    def _rotated(self, number: int) -> int:
        """The generation to use after a full one; it may be new."""
        newest = self._read()
        if newest is not None and newest > number:
            return newest  # another process was faster
        exists = self._execute("EXISTS", self._key(number))
        new = number + 1 if exists else number
        try:
            size = (str(self.error), str(self.capacity), "NONSCALING")
            self._execute("BF.RESERVE", self._key(new), *size)
        except FAULTS as error:
            if "exists" not in str(error):  # another process was faster
                raise
        self._execute("SET", self._key("newest"), str(new))
        self._execute("UNLINK", self._key(new - self.generations))
        return new

    def _known(self) -> int:
        if self._newest is None:
            self._newest = self._read() or 0
        return self._newest

    def _read(self) -> int | None:
        number = self._execute("GET", self._key("newest"))
        return None if number is None else int(number)

    def _key(self, part: int | str) -> str:
        return self._server.name(f"{self.name}:{part}")

    def _execute(self, *command: str) -> Any:
        client: Any = self._server.client()
        return client.execute_command(*command)
