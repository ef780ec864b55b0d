"""The server of the Redis store: it runs scripts by their digest, and WAIT after them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha1
from importlib import resources
from typing import Any, Final

from django.core.cache import InvalidCacheBackendError, caches
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from django_redis import get_redis_connection  # type: ignore[import-untyped]
from redis import Redis
from redis.client import NEVER_DECODE
from redis.cluster import RedisCluster
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    RedisClusterException,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...errors import StoreUnavailable

logger = logging.getLogger("idempotency_django")

Client = Redis | RedisCluster  # whose annotations say too little to check anything by them
FAULTS: Final = (RedisError, RedisClusterException, OSError)
REDIRECTIONS: Final = 5
"""The most redirects of a command by a cluster before it counts as unreachable."""


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
    """The server, or the cluster, of a cache of django-redis or of a connection factory."""

    def __init__(self, cache: str, connection_factory: str | Callable[[], Client] | None) -> None:
        self._cache = cache
        self._factory = connection_factory
        self._lock = threading.Lock()

    def client(self) -> Client:
        """The client; shared by all threads where a connection factory makes it.

        Raises:
            ImproperlyConfigured: there can be none.
        """
        if self._factory is not None:
            with self._lock:
                return self._made
        try:
            with self._configured():
                client: Client = get_redis_connection(self._cache, write=True)
        except NotImplementedError as error:
            raise ImproperlyConfigured(
                f"The cache {self._cache!r} is not a django-redis cache with one primary. Its "
                "BACKEND must be django_redis.cache.RedisCache, without ShardClient."
            ) from error
        except ValueError as error:
            raise ImproperlyConfigured(
                f"The cache {self._cache!r} has no usable LOCATION: {error}"
            ) from error
        return client

    def name(self, key: str) -> str:
        """The key as the cache names it, with its ``KEY_PREFIX``, ``VERSION``, ``KEY_FUNCTION``.

        Asked again each time, as a cache asks itself. A connection factory has no cache, and so no
        names but the store's own.

        Raises:
            ImproperlyConfigured: there is no such cache.
        """
        if self._factory is not None:
            return key
        with self._configured():
            return str(caches[self._cache].make_key(key))

    @contextmanager
    def _configured(self) -> Iterator[None]:
        try:
            yield
        except InvalidCacheBackendError as error:
            raise ImproperlyConfigured(
                f"The cache {self._cache!r} in CACHES cannot be used: {error}."
            ) from error

    @cached_property
    def _made(self) -> Client:
        factory = self._factory
        if isinstance(factory, str):
            try:
                factory = import_string(factory)
            except ImportError as error:
                raise ImproperlyConfigured(
                    f"The connection factory {factory!r} cannot be imported: {error}."
                ) from error
        client = factory() if callable(factory) else factory
        if not isinstance(client, Client):
            raise ImproperlyConfigured(
                f"The connection factory {self._factory!r} must be a function that returns a "
                f"redis.Redis or a redis.cluster.RedisCluster; it returned {client!r}."
            )
        return client

    def run(
        self, name: str, key: str, *arguments: str | bytes, wait: tuple[int, int] | None = None
    ) -> tuple[Any, int]:
        """Run the script on the key: one round trip.

        Args:
            name: the script's.
            key: the Redis key.
            arguments: the script's.
            wait: for how many replicas to wait, and for how many milliseconds.

        Returns:
            The script's reply, and how many of these replicas know what it wrote.

        Raises:
            StoreUnavailable: it is not known whether it ran.
        """

        def execute(*command: Any) -> tuple[Any, int]:
            client: Any = self.client()
            if wait is None:
                # Bytes, also from clients that are set to decode what they receive.
                return client.execute_command(*command, **{NEVER_DECODE: True}), 0
            if isinstance(client, RedisCluster):
                return _on_primary(client, key, command, ("WAIT", *wait))
            return _pipelined(client, command, ("WAIT", *wait))

        wanted = script(name)
        with reachable():
            try:
                return execute("EVALSHA", wanted.sha, 1, key, *arguments)
            except NoScriptError:  # the server has not seen it yet
                return execute("EVAL", wanted.text, 1, key, *arguments)

    def run_all(self, name: str, calls: Sequence[tuple[str, ...]]) -> list[Any]:
        """Run the script for each call, which begins with its key: one round trip for all.

        In a cluster, whose nodes share the keys and whose pipelines know no scripts, it is one
        for each.

        Raises:
            StoreUnavailable: it is not known for which of them it ran.
        """
        with reachable():
            client = self.client()
            if isinstance(client, RedisCluster):
                return [self.run(name, key, *arguments)[0] for key, *arguments in calls]
            wanted = script(name)
            pipeline: Any = client.pipeline(transaction=False)
            # The first one brings the text, so that the server knows the digest of the others.
            how = ("EVAL", wanted.text)
            for key, *arguments in calls:
                pipeline.execute_command(*how, 1, key, *arguments, **{NEVER_DECODE: True})
                how = ("EVALSHA", wanted.sha)
            return list(pipeline.execute())


def _pipelined(
    node: Any, command: tuple[Any, ...], wait: tuple[Any, ...], *, asking: bool = False
) -> tuple[Any, int]:
    """Send both at once: WAIT speaks of what was written on its own connection."""
    pipeline = node.pipeline(transaction=False)
    if asking:
        pipeline.execute_command("ASKING")
    pipeline.execute_command(*command, **{NEVER_DECODE: True})
    pipeline.execute_command(*wait)
    *_, result, acknowledged = pipeline.execute(raise_on_error=False)
    if isinstance(result, Exception):
        raise result
    if isinstance(acknowledged, Exception):
        logger.error("Redis does not wait for replicas: %s", acknowledged)
        return result, 0
    return result, int(acknowledged)


def _on_primary(
    cluster: Any, key: str, command: tuple[Any, ...], wait: tuple[Any, ...]
) -> tuple[Any, int]:
    """The same on the node that has the key; the cluster's own pipelines know no WAIT."""
    node, asking = cluster.get_node_from_key(key), False
    for _ in range(REDIRECTIONS):
        try:
            target = cluster.get_redis_connection(node)
            return _pipelined(target, command, wait, asking=asking)
        except AskError as elsewhere:  # also MovedError, which speaks of every later command too
            asking = not isinstance(elsewhere, MovedError)
            if not asking:
                cluster.nodes_manager.initialize()
            # The node that sends us on knows best: others hear of a moved slot some time later.
            node = _redirected(cluster, elsewhere) or cluster.get_node_from_key(key)
        except (RedisConnectionError, RedisTimeoutError, ClusterDownError):
            with suppress(*FAULTS):  # so that the next call finds a new primary
                cluster.nodes_manager.initialize()
            raise
    raise RedisError("The cluster redirected the command too many times.")


def _redirected(cluster: Any, elsewhere: AskError) -> Any:
    """The node of a redirection; ``None``: the cluster has not named it yet."""
    named = {"host": elsewhere.host, "port": elsewhere.port}
    node = cluster.get_node(**named)
    if node is None:
        cluster.nodes_manager.initialize()
        node = cluster.get_node(**named)
    return node
