"""``CachedStore``: replays without a statement, and a cache that outlives nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.core.cache import caches
from django.core.cache.backends.locmem import LocMemCache
from django.db import connection, connections
from django.http import HttpRequest, HttpResponse
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from idempotency_django.contrib.cached import CachedStore
from idempotency_django.decorators import idempotent
from idempotency_django.models import DatabaseNow, IdempotencyKey
from idempotency_django.stores import stores
from idempotency_django.stores.records import Record
from idempotency_django.testing import RESPONSE, an_operation
from idempotency_django.testing.contract import as_claim, as_record
from tests.models import Effect
from tests.support.servers import Server
from tests.support.shared import assert_replays, completed, effects, new_key, post

pytestmark = pytest.mark.django_db(transaction=True)

STORES = {"default": {"BACKEND": "idempotency_django.contrib.cached.CachedStore"}}


class Broken(LocMemCache):
    """A cache that cannot be reached."""

    def get(self, *args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no cache")

    add = set = get


@idempotent
def order(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    return HttpResponse(b"\x00\xff", "text/plain", status=201, headers={"Location": "/orders/1"})


@idempotent(mode="leased")
def leased(request: HttpRequest) -> HttpResponse:
    return order.__wrapped__(request)


urlpatterns = [path("order/", csrf_exempt(order)), path("leased/", csrf_exempt(leased))]


@pytest.fixture(params=["valkey", "memory"], autouse=True)
def cache(request: pytest.FixtureRequest, redis_server: Server) -> Iterator[Any]:
    """A cache, empty."""
    backend = {
        "valkey": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": redis_server.url},
        "memory": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    }[request.param]
    broken = {"BACKEND": f"{__name__}.Broken"}
    with override_settings(
        CACHES={"default": backend, "broken": broken},
        IDEMPOTENCY={"STORES": STORES},
        ROOT_URLCONF=__name__,
    ):
        caches["default"].clear()
        yield caches["default"]


@pytest.fixture
def store() -> CachedStore:
    made = stores["default"]
    assert isinstance(made, CachedStore)
    return made


def test_two_schemas(store: CachedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant with a schema of its own, as django-tenants has them, has responses of its own."""
    wrapper = connections["default"]
    monkeypatch.setattr(wrapper, "schema_name", "acme", raising=False)
    operation = completed(store)
    assert store.recall(operation) is not None
    monkeypatch.setattr(wrapper, "schema_name", "globex")
    assert store.recall(operation) is None


@pytest.mark.parametrize("url", ["/order/", "/leased/"])
def test_a_replay_costs_no_statement(client: Client, url: str) -> None:
    """Every replay, the first one too, comes from the cache alone; it is the first response."""
    key = new_key()
    first = post(client, url, key)
    with CaptureQueriesContext(connection) as queries:
        assert_replays(first, post(client, url, key))
        assert post(client, url, key, reference="b").status_code == 422
    assert [query["sql"] for query in queries if query["sql"] not in ("BEGIN", "COMMIT")] == []
    assert effects() == 1


def test_nothing_is_cached_before_the_commit(store: CachedStore) -> None:
    """What is rolled back was never in the cache."""
    operation = an_operation()
    with pytest.raises(InterruptedError), store.transaction():
        claim = as_claim(store.acquire(operation))
        store.complete(claim, RESPONSE)
        assert store.recall(operation) is None
        raise InterruptedError
    assert store.recall(operation) is None


def test_the_cache_is_filled_again(store: CachedStore, cache: Any) -> None:
    """What the cache has lost is read from the database once, and cached again."""
    operation = completed(store)
    cache.clear()
    assert store.recall(operation) is None
    with store.transaction():
        assert isinstance(store.acquire(operation), Record)
    known = store.recall(operation)
    assert known is not None
    assert known.payload == RESPONSE


def test_no_longer_than_the_record(store: CachedStore, cache: Any) -> None:
    """Nothing is cached beyond the end of its record's life, by the database's clock."""
    short = completed(store, ttl=timedelta(seconds=1))
    assert store.recall(short) is None
    operation = completed(store, ttl=timedelta(seconds=60))
    cache.clear()
    IdempotencyKey.objects.update(expires_at=DatabaseNow() + timedelta(seconds=1.5))
    with store.transaction():
        store.acquire(operation)
    assert store.recall(operation) is None


@pytest.mark.parametrize("ttl", [None, timedelta(days=30)])
def test_max_age(cache: Any, ttl: timedelta | None) -> None:
    """However long a record lives, its response leaves the cache ``max_age`` after it was stored.

    So what a fail-over of the database has lost is not replayed for longer.
    """
    if not isinstance(cache, LocMemCache):
        pytest.skip("the cache in memory tells when an entry expires")
    store = CachedStore("default", max_age=timedelta(minutes=1))
    operation = completed(store, ttl=ttl)
    expires: Any = cache._expire_info[cache.make_key(store._name(operation.key, operation.scope))]
    assert time.time() < expires <= time.time() + 60


def test_forgotten_stays_so(store: CachedStore) -> None:
    """What was forgotten is not put back by a request that had read it before."""
    operation = completed(store)
    with store.transaction():
        under_way = store.acquire(operation)
    store.forget(operation.key, operation.scope)
    assert store.recall(operation) is None
    assert isinstance(under_way, Record)
    store._remember(under_way, time.monotonic())
    assert store.recall(operation) is None
    with store.transaction():
        assert isinstance(store.acquire(operation), Record)
    assert store.recall(operation) is None


def test_cached_too_late(store: CachedStore, cache: Any) -> None:
    """Who read a response longer ago than the forgotten stays forgotten does not cache it."""
    operation = completed(store)
    under_way = as_record(store.acquire(replace(operation, lease=timedelta(seconds=30))))
    cache.clear()
    store._remember(under_way, time.monotonic() - store.max_age)
    assert store.recall(operation) is None
    store._remember(under_way, time.monotonic())
    assert store.recall(operation) is not None


@pytest.mark.parametrize("rubbish", [b"no\nbody", "text", b'["k"]\nbody'])
def test_rubbish_in_the_cache(store: CachedStore, cache: Any, rubbish: object) -> None:
    """What is no response is logged and not given; the database is read."""
    operation = completed(store)
    cache.set(store._name(operation.key, operation.scope), rubbish)
    assert store.recall(operation) is None
    with store.transaction():
        found = as_record(store.acquire(operation))
    assert found.payload == RESPONSE


def test_faults_are_logged_and_not_shown(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """While the cache cannot be reached, the database is read."""
    broken = {"default": {**STORES["default"], "OPTIONS": {"cache": "broken"}}}
    with override_settings(IDEMPOTENCY={"STORES": broken}), caplog.at_level(logging.WARNING):
        key = new_key()
        first = post(client, "/order/", key)
        assert_replays(first, post(client, "/order/", key))
        stores["default"].forget(key, "scope")
    assert effects() == 1
    assert "cannot be read" in caplog.text
    assert "could not be cached" in caplog.text
    assert "may be replayed for up to 600 seconds" in caplog.text


def test_checks(cache: Any) -> None:
    """A cache that is not there, or that each process has for itself, is told."""

    def ids(**options: Any) -> list[str | None]:
        return [message.id for message in CachedStore("default", **options).check()]

    assert "idempotency_django.E003" in ids(cache="missing")
    missing = CachedStore("default", cache="missing").check()
    assert any("'missing', which is not in CACHES" in message.msg for message in missing)
    assert ("idempotency_django.W018" in ids()) is isinstance(cache, LocMemCache)
