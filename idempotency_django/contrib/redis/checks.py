"""The possible problems of a store's Redis server, for the system checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's names
from django.core.exceptions import ImproperlyConfigured
from redis import ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from .server import FAULTS, RedisServer

TIMEOUT: Final = 1.0
"""Seconds to wait for the response of a server."""


def check_redis(alias: str, server: RedisServer) -> Sequence[CheckMessage]:
    """The problems of the server of store ``alias``; asks it, for as long as a check may take."""
    try:
        policy = _info(server.client()).get("maxmemory_policy", "noeviction")
    except ImproperlyConfigured as error:
        return [Error(f"The store {alias!r}: {error}", id="idempotency_django.E003")]
    except FAULTS as error:
        return [
            Warning(
                f"The store {alias!r} cannot reach its Redis server: {error}",
                hint="Check its address and that it is running. Requests with a key get 503 until "
                "it responds.",
                id="idempotency_django.W016",
            )
        ]
    if policy == "noeviction":
        return []
    return [
        Warning(
            f"The store {alias!r} uses a Redis server with maxmemory-policy {policy}.",
            hint=(
                "When its memory is full, it evicts live keys, and retries execute their "
                "operations again. Set maxmemory-policy to noeviction, and use another server for "
                "caches."
            ),
            id="idempotency_django.W015",
        )
    ]


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
