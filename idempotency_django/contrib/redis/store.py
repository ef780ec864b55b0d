"""The store in Redis or Valkey: leases only, and only as durable as the server."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any, Final, NoReturn

from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's names
from django.core.exceptions import ImproperlyConfigured
from redis import ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ...errors import StoreUnavailable
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
from .server import FAULTS, ConnectionFactory, RedisServer

logger = logging.getLogger("idempotency_django")

TIMEOUT: Final = 1.0
"""Seconds that a check waits for the response of a server."""


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
