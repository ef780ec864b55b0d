"""The store in Redis or Valkey: leases only, and only as durable as the server."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property, partial
from hashlib import sha1, sha256
from importlib import resources
from typing import Any, Final, NoReturn

from django.core.cache import caches
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's names
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ...errors import StoreUnavailable
from ...lazy import extra
from ...stores import (
    Claim,
    Operation,
    Payload,
    Record,
    Status,
    Store,
    decode,
    encode,
    forbid_transactions,
    new_token,
)

with extra("redis"):
    from django_redis import get_redis_connection  # type: ignore[import-untyped]
    from redis import ConnectionPool, Redis
    from redis.backoff import NoBackoff
    from redis.client import NEVER_DECODE
    from redis.exceptions import NoScriptError, RedisError
    from redis.retry import Retry

__all__ = ["RedisStore"]

logger = logging.getLogger("idempotency_django")

FAULTS: Final = (RedisError, OSError)
ConnectionFactory = str | Callable[[], Redis] | None
BYTES: Final = {NEVER_DECODE: True}
"""Replies are bytes, also from clients that are set to decode what they receive."""
TIMEOUT: Final = 1.0
"""Seconds that a check waits for the response of a server."""


# The server, which runs scripts by their digest.


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


# What scripts take and reply.


def milliseconds(duration: timedelta | None) -> str:
    """A duration for a script: at least one; empty where there is none."""
    return "" if duration is None else str(max(1, round(duration / timedelta(milliseconds=1))))


def flag(value: bool) -> str:
    """A truth value for a script."""
    return "1" if value else "0"


def text(value: str) -> bytes:
    """Any text for a script, for people to read."""
    return value.encode("utf-8", "replace")


def read_record(key: str, scope: str, reply: list[bytes]) -> Record:
    """The record that a script described.

    Raises:
        ValueError: it is not what the store writes.
    """
    _, status, attempt, fingerprint, code, headers, size, body, *flags, lease_left, ttl_left = reply
    expired, interrupted, held, counted = (flag == b"1" for flag in flags)
    state = Status(status.decode())
    completed = state is Status.COMPLETED
    return Record(
        key=key,
        scope=scope,
        status=state,
        attempt=int(attempt),
        fingerprint=fingerprint.decode(),
        payload=decode(int(code), headers, body if size else None) if completed else None,
        expired=expired,
        interrupted=interrupted,
        held=held,
        lease_left=int(lease_left) / 1000 if lease_left else None,
        ttl_left=int(ttl_left) / 1000 if ttl_left else None,
        counted=counted,
    )


class RedisStore(Store):
    """Records as hashes on a Redis (6.2 or newer) or Valkey server, one Redis key for each.

    Every method is one Lua script on one Redis key, and one round trip; all times are the server's.
    The server deletes expired records automatically, with ``on_expired="refuse"`` at the end of
    their ``retention``. The first attempt after that is attempt 1 again. Nothing rolls back with
    this store, and it keeps no recovery points. An operation without a lease stays claimed until
    its owner completes or fails it.

    Args:
        alias: the store's name in ``IDEMPOTENCY["STORES"]``.
        cache: a cache of django-redis, by its alias in ``CACHES``. The store uses its primary. The
            cache also names the Redis keys, so its ``KEY_PREFIX``, ``VERSION`` and ``KEY_FUNCTION``
            keep the projects on one server apart.
        connection_factory: instead of ``cache``: a function, or its dotted path, that returns the
            ``redis.Redis`` to use; called once. Without a cache, only ``prefix`` names the Redis
            keys: two projects on one server then need two prefixes.
        prefix: what the Redis keys of this store begin with, after the prefix of the cache.
    """

    def __init__(
        self,
        alias: str,
        *,
        cache: str = "default",
        connection_factory: ConnectionFactory = None,
        prefix: str = "idempotency",
    ) -> None:
        super().__init__(alias)
        self._server = RedisServer(cache, connection_factory)
        self._prefix = prefix

    def acquire(self, operation: Operation) -> Claim | Record:
        forbid_transactions(f"The claim of {operation.name}")
        reply = self._run(
            "acquire",
            operation.key,
            operation.scope,
            new_token(),
            operation.fingerprint,
            milliseconds(operation.ttl),
            milliseconds(operation.lease),
            flag(operation.hold),
            flag(operation.count_replays),
            flag(operation.extend_on_replay),
            flag(operation.refuse_expired),
            milliseconds(operation.retention) if operation.refuse_expired else "0",
            *map(text, (operation.name, operation.principal, operation.method, operation.path)),
            operation.caused_by,
        )
        if reply[0] != b"claimed":
            return self._record(operation.key, operation.scope, reply)
        token = reply[3].decode()
        return Claim(operation, int(reply[1]), token, interrupted=reply[2] == b"1")

    def complete(self, claim: Claim, payload: Payload, *, last: bool = False) -> bool:
        status, headers, body = encode(payload)
        reply = self._run(
            "complete",
            claim.key,
            claim.scope,
            claim.token,
            secrets.token_hex(8),
            str(status),
            headers,
            "" if body is None else str(len(body)),
            body or b"",
            milliseconds(claim.operation.ttl),
        )
        return bool(reply)

    def fail(self, claim: Claim, error: str, *, pinned: bool = False, held: bool = False) -> bool:
        note = (text(error[:4096]), flag(pinned), flag(held))
        call = secrets.token_hex(8)
        return bool(self._run("fail", claim.key, claim.scope, claim.token, call, *note))

    def extend(self, claim: Claim, seconds: float) -> bool:
        lease = milliseconds(timedelta(seconds=seconds))
        return bool(self._run("extend", claim.key, claim.scope, claim.token, lease))

    def get(self, key: str, scope: str) -> Record | None:
        reply = self._run("get", key, scope)
        return self._record(key, scope, reply) if reply else None

    def record_replay(self, record: Record, operation: Operation, *, last: bool = False) -> None:
        if not (operation.count_replays or operation.extend_on_replay):
            return
        try:
            self._run(
                "replay",
                record.key,
                record.scope,
                str(record.attempt),
                flag(operation.count_replays),
                flag(operation.extend_on_replay),
                milliseconds(operation.ttl),
            )
        except StoreUnavailable:
            logger.warning("A replay of %s was not counted.", record.key, exc_info=True)

    def purge(self, older_than: timedelta, limit: int) -> int:
        return 0

    def check(self) -> Sequence[CheckMessage]:
        try:
            policy = _info(self._server.client()).get("maxmemory_policy", "noeviction")
        except ImproperlyConfigured as error:
            return [Error(f"The store {self.alias!r}: {error}", id="idempotency_django.E003")]
        except FAULTS as error:
            return [
                Warning(
                    f"The store {self.alias!r} cannot reach its Redis server: {error}",
                    hint="Check its address and that it is running. Requests with a key get 503 "
                    "until it responds.",
                    id="idempotency_django.W016",
                )
            ]
        if policy == "noeviction":
            return []
        return [
            Warning(
                f"The store {self.alias!r} uses a Redis server with maxmemory-policy {policy}.",
                hint=(
                    "When its memory is full, it evicts live keys, and retries execute their "
                    "operations again. Set maxmemory-policy to noeviction, and use another server "
                    "for caches."
                ),
                id="idempotency_django.W015",
            )
        ]

    def redis_key(self, key: str, scope: str) -> str:
        """The Redis key of the record: a digest of key and scope, as the cache names its keys."""
        parts = f"{len(key)}:{key}{len(scope)}:{scope}"
        return self._server.name(f"{self._prefix}:{sha256(parts.encode()).hexdigest()}")

    def _run(self, script: str, key: str, scope: str, *arguments: str | bytes) -> Any:
        """The reply of a script."""
        reply = self._server.run(script, self.redis_key(key, scope), key, scope, *arguments)
        if isinstance(reply, list) and reply[0] == b"broken":
            self._broken(key, scope, reply[1].decode("utf-8", "replace"))
        return reply

    def _record(self, key: str, scope: str, reply: list[bytes]) -> Record:
        try:
            return read_record(key, scope, reply)
        except ValueError as error:
            self._broken(key, scope, str(error))

    def _broken(self, key: str, scope: str, problem: str) -> NoReturn:
        """Neither replay an incomplete record, nor execute its operation."""
        logger.error(
            "The Redis value %s is not a record of key %r in scope %r: %s. Check whether the "
            "operation was executed, then delete the value.",
            self.redis_key(key, scope),
            key,
            scope,
            problem,
        )
        raise StoreUnavailable(
            "The record of this idempotency key is damaged. The operation is neither executed nor "
            "replayed until an operator has checked the record."
        )


def _info(client: Redis) -> dict[str, Any]:
    """Ask on a connection of its own: the timeouts of the others may be long."""
    pool = client.connection_pool
    options = pool.connection_kwargs | {
        "socket_timeout": TIMEOUT,
        "socket_connect_timeout": TIMEOUT,
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": True,
    }
    pool_of_one = ConnectionPool(
        connection_class=pool.connection_class, max_connections=1, **options
    )
    try:
        info: dict[str, Any] = Redis(connection_pool=pool_of_one).info()
    finally:
        pool_of_one.disconnect()
    return info
