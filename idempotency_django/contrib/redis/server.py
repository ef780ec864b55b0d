"""The server of the Redis store: it runs scripts by their digest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from hashlib import sha1
from importlib import resources
from typing import Any, Final

from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from django_redis import get_redis_connection  # type: ignore[import-untyped]
from redis import Redis
from redis.client import NEVER_DECODE
from redis.exceptions import NoScriptError, RedisError

from ...errors import StoreUnavailable

FAULTS: Final = (RedisError, OSError)
ConnectionFactory = str | Callable[[], Redis] | None
BYTES: Final = {NEVER_DECODE: True}
"""Replies are bytes, also from clients that are set to decode what they receive."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the digest that the server knows it by."""

    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """The script of that name in ``scripts``, after the part that all of them share."""
    folder = resources.files(__package__) / "scripts"
    text = "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in ("record", name))
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


@contextmanager
def reachable() -> Iterator[None]:
    """Say in the store's own terms that Redis is absent, full, read-only or otherwise of no use."""
    try:
        yield
    except FAULTS as error:
        raise StoreUnavailable from error


class RedisServer:
    """The server of a cache of django-redis or of a connection factory."""

    def __init__(self, cache: str, connection_factory: ConnectionFactory) -> None:
        self._cache = cache
        self._factory = connection_factory
        self._lock = threading.Lock()

    def client(self) -> Redis:
        """The client; shared by all threads where a connection factory makes it.

        Raises:
            ImproperlyConfigured: there can be none.
        """
        try:
            if self._factory is not None:
                with self._lock:
                    return self._made
            client: Redis = get_redis_connection(self._cache, write=True)
        except (ImportError, NotImplementedError, TypeError, ValueError) as error:
            raise ImproperlyConfigured(
                f"The connection factory {self._factory!r} cannot be used: {error}."
                if self._factory
                else f"The cache {self._cache!r} cannot be used: {error}. It must be a cache of "
                "django-redis with one primary, without ShardClient."
            ) from error
        return client

    def name(self, key: str) -> str:
        """The key as the cache names it, with its ``KEY_PREFIX``, ``VERSION``, ``KEY_FUNCTION``.

        Asked again each time, as a cache asks itself. A connection factory has no cache, and so no
        names but the store's own.

        Raises:
            ImproperlyConfigured: there is no such cache.
        """
        return key if self._factory is not None else str(caches[self._cache].make_key(key))

    @cached_property
    def _made(self) -> Redis:
        factory: Any = self._factory
        client = (import_string(factory) if isinstance(factory, str) else factory)()
        if not isinstance(client, Redis):
            raise ImproperlyConfigured(
                f"The connection factory {factory!r} must be a function that returns a "
                f"redis.Redis; it returned {client!r}."
            )
        return client

    def run(self, name: str, key: str, *arguments: str | bytes) -> Any:
        """The reply of the script, run on the key: one round trip.

        Args:
            name: the script's.
            key: the Redis key.
            arguments: the script's.

        Raises:
            StoreUnavailable: it is not known whether it ran.
        """
        wanted = script(name)
        with reachable():
            execute: Any = partial(self.client().execute_command, **BYTES)
            try:
                return execute("EVALSHA", wanted.sha, 1, key, *arguments)
            except NoScriptError:  # the server has not seen it yet
                return execute("EVAL", wanted.text, 1, key, *arguments)
