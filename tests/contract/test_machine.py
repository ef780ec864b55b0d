"""Random interleavings of all that can happen to a key, over every store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.db import connections
from django_redis import get_redis_connection

from idempotency_django.contrib.cached import CachedStore
from idempotency_django.contrib.redis import RedisStore
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from tests.contract import clocks
from tests.contract.machine import Subject, explore
from tests.support.servers import valkey

# Many examples take some forty seconds for each store on a machine that has nothing else to do.
pytestmark = pytest.mark.timeout(1200)
FEW, MANY = 100, 2_000
how_many = pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.nightly)])
ALL_DATABASES = pytest.mark.django_db(transaction=True, databases="__all__")


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def using(request: pytest.FixtureRequest, transactional_db: None) -> str:
    """The alias of each database in turn, which need not survive a crash of the machine."""
    if request.param not in django_settings.ALIASES:
        pytest.skip(f"NO {request.param} HERE")
    alias = django_settings.ALIASES[request.param]
    if request.param == "sqlite":
        with connections[alias].cursor() as cursor:
            cursor.execute("PRAGMA synchronous = OFF")
    return alias


@pytest.fixture
def valkey_cache(settings: Any) -> Iterator[None]:
    """A server for the default cache."""
    with valkey() as server:
        cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.url}
        settings.CACHES = {"default": cache}
        yield
        get_redis_connection("default").connection_pool.disconnect()


def assert_keeps_the_contract(subject: Subject, examples: int, record_property: Any) -> None:
    """No example is a counterexample, and there were enough of them."""
    explore(subject, examples)
    record_property("examples", subject.examples)
    record_property("steps", subject.steps)
    print(f"{subject.examples} examples, {subject.steps} steps")
    assert subject.examples >= examples


@how_many
def test_memory_store(examples: int, record_property: Any) -> None:
    """The store in memory keeps the contract, whatever happens in which order."""
    subject = Subject(lambda: MemoryStore("memory"), clocks.memory)
    assert_keeps_the_contract(subject, examples, record_property)


@how_many
@ALL_DATABASES
def test_database_store(
    using: str, examples: int, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database store keeps the contract, whatever happens in which order."""
    store = DatabaseStore("default", using=using)
    subject = Subject(lambda: store, clocks.Database(monkeypatch), clocks.without_row)
    assert_keeps_the_contract(subject, examples, record_property)


@how_many
@pytest.mark.django_db(transaction=True)
def test_cached_store(
    examples: int, record_property: Any, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """The cached store keeps the contract, and recalls nothing that is not so any more."""
    backend = "django.core.cache.backends.locmem.LocMemCache"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": "machine"}}
    store = CachedStore("default")
    subject = Subject(lambda: store, clocks.Cached(monkeypatch), clocks.without_row)
    assert_keeps_the_contract(subject, examples, record_property)


@how_many
@pytest.mark.usefixtures("valkey_cache")
def test_redis_store(examples: int, record_property: Any) -> None:
    """The Redis store keeps the contract, whatever happens in which order."""
    store = RedisStore("redis")
    subject = Subject(lambda: store, clocks.redis, forgets=True)
    assert_keeps_the_contract(subject, examples, record_property)
