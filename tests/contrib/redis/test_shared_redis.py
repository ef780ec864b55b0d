"""Two projects on one Redis: what keeps their caches apart keeps their operations apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.test import override_settings
from django_redis import get_redis_connection

from idempotency_django.contrib.cached import CachedStore
from idempotency_django.contrib.redis import RedisStore
from idempotency_django.stores.base import Store
from idempotency_django.stores.records import Claim, Operation, Payload
from idempotency_django.testing import RESPONSE, an_operation
from idempotency_django.testing.contract import as_record
from tests.support.servers import Server

OTHERS_RESPONSE = Payload(201, (), b"the other shop's")


def reversed_name(key: str, prefix: str, version: int) -> str:
    """A KEY_FUNCTION that puts everything somewhere else."""
    return f"v{version}/{key}/{prefix}"


@pytest.fixture
def shop(redis_server: Server) -> Iterator[Any]:
    """Makes the settings of one shop."""
    made = []

    def settings(**options: Any) -> override_settings:
        cache = {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": redis_server.url,
            **options,
        }
        made.append(override_settings(CACHES={"default": cache}))
        return made[-1]

    with settings():
        yield settings
        get_redis_connection("default").connection_pool.disconnect()


def complete(store: Store, operation: Operation, response: Payload) -> bool:
    """Execute the operation, where its key is free; whether it was."""
    with store.transaction():
        claim = store.acquire(operation)
        return isinstance(claim, Claim) and store.complete(claim, response)


APART = pytest.mark.parametrize(
    "options",
    [
        {"KEY_PREFIX": "other"},
        {"VERSION": 2},
        {"KEY_FUNCTION": f"{__name__}.reversed_name"},
    ],
    ids=lambda options: next(iter(options)),
)


@APART
def test_the_other_shop_executes(shop: Any, options: dict[str, Any]) -> None:
    """What a cache's settings keep apart is claimed, completed and found by each shop alone."""
    store, operation = RedisStore("default"), an_operation()
    assert complete(store, operation, OTHERS_RESPONSE)
    with shop(**options):
        assert RedisStore("default").get(operation.key, operation.scope) is None
        assert complete(store, operation, RESPONSE)  # it goes by what its cache has now
    found = as_record(store.acquire(operation))
    assert found.payload == OTHERS_RESPONSE


@APART
def test_recalls_nothing_of_the_other_shop(
    shop: Any, options: dict[str, Any], transactional_db: None
) -> None:
    """A cached response of another shop, which has a database of its own, is not recalled."""
    operation = an_operation()
    assert complete(CachedStore("default"), operation, OTHERS_RESPONSE)
    assert CachedStore("default").recall(operation) is not None
    with shop(**options):
        assert CachedStore("default").recall(operation) is None


def test_what_the_key_looks_like(shop: Any) -> None:
    """The cache names the key, so that it is found by the project's prefix and deleted with it."""
    with shop(KEY_PREFIX="shop", VERSION=3):
        store, operation = RedisStore("default"), an_operation()
        assert complete(store, operation, RESPONSE)
        name = store.redis_key(operation.key, operation.scope)
        assert name.startswith("shop:3:idempotency:")
        redis = get_redis_connection("default")
        assert [found.decode() for found in redis.scan_iter("shop:3:idempotency:*")] == [name]
