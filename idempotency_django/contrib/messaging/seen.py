"""Filters that know whether an event *may* have been handled: they spare look-ups, and decide none.

A filter only decides whether to ask the store. What it says is never the last word, so one that is
wrong, full, restarted or out of reach loses no event and repeats no effect.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from hashlib import blake2b
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from ..redis import ConnectionFactory

logger = logging.getLogger("idempotency_django")

PAUSE: Final = 5
"""Seconds without use of a filter after it failed."""


class SeenFilter(ABC):
    """A filter that a consumer asks before it claims an event, and tells after the commit.

    If it says no, the event is claimed at once, and the claim is exact. If it says maybe,
    or cannot be asked, the store is asked first: a duplicate then costs one read, no claim and no
    transaction. Such a duplicate is not counted as a replay in the audit trail.

    Use :class:`RedisBloom` or :class:`RedisSet`, or write one of your own: a
    subclass with :meth:`contains` and :meth:`add`. One filter may serve several consumers. Threads
    share it.
    """

    _resumes_at: float = 0

    @abstractmethod
    def contains(self, ids: Sequence[str]) -> Sequence[bool]:
        """Whether each of the ids may have been added. One that was may be forgotten again."""

    @abstractmethod
    def add(self, ids: Sequence[str]) -> None:
        """Add the ids. Some may be there already."""

    def may_contain(self, ids: Sequence[str]) -> Sequence[bool]:
        """:meth:`contains`; after a fault each of them may be there. A fault is logged.

        Raises:
            ImproperlyConfigured: the filter cannot work as it is configured.
        """
        if time.monotonic() >= self._resumes_at:
            try:
                return [bool(each) for each in self.contains(ids)]
            except ImproperlyConfigured:
                raise
            except Exception:  # noqa: BLE001  # whatever it is, the event is handled
                self._rest()
        return [True] * len(ids)

    def remember(self, ids: Sequence[str]) -> None:
        """:meth:`add`, for events that are committed: a fault is logged and does no harm."""
        if ids and time.monotonic() >= self._resumes_at:
            try:
                self.add(ids)
            except Exception:  # noqa: BLE001  # what was done is committed
                self._rest()

    def _rest(self) -> None:
        self._resumes_at = time.monotonic() + PAUSE
        logger.warning(
            "The filter of seen events %r failed. For %d seconds, each event is looked up in the "
            "store, which is slower but equally safe.",
            self,
            PAUSE,
            exc_info=True,  # noqa: LOG014  # called by the exception handlers
        )


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
        redis: Any = import_module("idempotency_django.contrib.redis")  # others need none
        self._server = redis.RedisServer(cache, connection_factory)

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
