"""A key that is used again after its record is gone publishes messages of its own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from django.db import transaction
from django.test import override_settings
from redis import Redis

from idempotency_django.contrib.celery import IdempotentTask
from idempotency_django.contrib.messaging import Consumer, Relay, after_commit, publish
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.models import DatabaseNow, IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.testing import eventually
from tests.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__"), pytest.mark.driver]

MODES = ("transactional", "leased")
DATABASE = "idempotency_django.stores.database.DatabaseStore"
MEMORY = "idempotency_django.stores.memory.MemoryStore"
REDIS = "idempotency_django.contrib.redis.RedisStore"
CACHED = "idempotency_django.contrib.cached.CachedStore"

consumer = Consumer("booking")
app = Celery("again", broker="memory://", set_as_current=False, fixups=[])
app.conf.task_always_eager = app.conf.task_eager_propagates = True


class Crash(Exception):
    """The attempt ends here."""


@consumer.on("order.paid")
def book(event: Any, execution: Any) -> None:
    """The effect of the consumer."""
    Effect.objects.using(consumer_database[0]).create(reference="booked")


def receipt() -> None:
    """The effect of a call after the commit."""
    Effect.objects.using(consumer_database[0]).create(reference="receipt")


@app.task(base=IdempotentTask, shared=False)
def ship() -> None:
    """The effect of a task without a key."""
    Effect.objects.using(consumer_database[0]).create(reference="shipped")


consumer_database: list[str] = []


def configured(alias: str, backend: str = DATABASE, **options: Any) -> Any:
    """Settings whose records are in a store, and whose messages are in this database."""
    store = {"BACKEND": backend, "OPTIONS": options}
    records = {"BACKEND": DATABASE, "OPTIONS": {"using": alias}}
    local = "idempotency_django.contrib.messaging.LocalPublisher"
    return override_settings(
        IDEMPOTENCY={
            "MESSAGING_DATABASE": alias,
            "STORES": {"default": records, "claims": store},
            "OUTBOX": {
                "orders": {
                    "BACKEND": local,
                    "OPTIONS": {"consumers": [f"{__name__}.consumer"]},
                },
                "celery": {"OPTIONS": {"app": f"{__name__}.app"}},
            },
        }
    )


@pytest.fixture
def database(using: str) -> Iterator[str]:
    """The records, the messages and the effects are all in each of the databases."""
    consumer_database[:] = [using]
    with configured(using, using=using):
        yield using


@pytest.fixture(params=[DATABASE, CACHED, MEMORY, REDIS], ids=lambda path: path.split(".")[-1])
def leased(request: pytest.FixtureRequest, using: str) -> Iterator[str]:
    """The claims are in each of the stores."""
    options: dict[str, Any] = {"using": using}
    if request.param == MEMORY:
        options = {}
    if request.param == REDIS:
        server = request.getfixturevalue("redis_server")
        client = Redis.from_url(server.url)
        client.flushall()
        options = {"connection_factory": lambda: client}
    with configured(using, request.param, **options):
        yield using


def call(function: Any, using: str, mode: str = "leased", **policy: Any) -> Any:
    """Call it under one key, again and again."""
    given = {"mode": mode, "store": "claims", **policy}
    return idempotent_call(function, key="k", scope="s", policy=Policy(**given))


def pay(using: str, mode: str) -> None:
    """An effect, and a message of each kind that goes with it."""

    def handler(execution: Any) -> None:
        with execution.atomic():
            Effect.objects.using(using).create(reference="paid")
            publish("orders", {"order": 17}, type="order.paid")
            after_commit(receipt)
            ship.enqueue_once()

    call(handler, using, mode)


def forget(using: str, *, messages: bool) -> None:
    """The record's lifetime and retention are over, and it is purged."""
    records = IdempotencyKey.objects.using(using).filter(key="k", scope="s")
    assert records.update(expires_at=DatabaseNow(), purge_at=DatabaseNow()) == 1
    assert records.delete()[0]
    if messages:
        OutboxMessage.objects.using(using).all().delete()


@pytest.mark.parametrize("messages", [False, True], ids=["old messages kept", "all purged"])
@pytest.mark.parametrize("mode", MODES)
def test_purged(database: str, mode: str, messages: bool) -> None:
    """A key that is used again after the purge has its messages, calls and tasks again, and each of
    them has its effect again, whether the old messages are there or not.
    """
    for times in (1, 2):
        pay(database, mode)
        assert Relay().drain() == 3
        found = Effect.objects.using(database).values_list("reference", flat=True)
        assert sorted(found) == sorted(["paid", "booked", "receipt", "shipped"] * times)
        forget(database, messages=messages)


def test_resumed_in_each_store(leased: str) -> None:
    """In each store, attempts at one record publish the same ids, and the next record others."""
    ids: list[str] = []

    def handler(execution: Any) -> None:
        with transaction.atomic(using=leased):
            ids.append(publish("orders", 1, type="order.paid"))
        if len(ids) in (1, 2):
            raise Crash

    short = {"ttl": timedelta(seconds=1), "lease": timedelta(milliseconds=500)}
    for _ in range(2):
        with pytest.raises(Crash):
            call(handler, leased)
    call(handler, leased, **short)
    assert len({*ids}) == 1

    eventually(lambda: call(handler, leased, **short) or len(ids) == 4)
    assert ids[3] != ids[0]
    assert OutboxMessage.objects.using(leased).count() == 2
