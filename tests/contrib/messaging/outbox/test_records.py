"""A key that is used again after its record is gone publishes messages of its own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from redis import Redis

from idempotency_django.contrib.messaging import Relay, publish
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.testing import eventually

from .conftest import Broker, changed_settings

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.usefixtures("broker"),
    pytest.mark.driver,
]

MODES = ("transactional", "leased")
DATABASE = "idempotency_django.stores.database.DatabaseStore"
MEMORY = "idempotency_django.stores.memory.MemoryStore"
REDIS = "idempotency_django.contrib.redis.RedisStore"
CACHED = "idempotency_django.contrib.cached.CachedStore"


class Crash(Exception):
    """The attempt ends here."""


def claims_in(alias: str, backend: str = DATABASE, **options: Any) -> Any:
    """Settings with a store of claims; the messages and other records are in this database."""
    records = {"BACKEND": DATABASE, "OPTIONS": {"using": alias}}
    claims = {"BACKEND": backend, "OPTIONS": options}
    return changed_settings(STORES={"default": records, "claims": claims})


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
    with claims_in(using, request.param, **options):
        yield using


def call(function: Any, mode: str = "leased", **policy: Any) -> Any:
    """Call it under one key, again and again."""
    given = {"mode": mode, "store": "claims", **policy}
    return idempotent_call(function, key="k", scope="s", policy=Policy(**given))


@pytest.mark.parametrize("messages", [False, True], ids=["old messages kept", "all purged"])
@pytest.mark.parametrize("mode", MODES)
def test_purged(using: str, broker: type[Broker], mode: str, messages: bool) -> None:
    """A key that is used again after the purge has its messages again, under other ids, whether the
    old messages are there or not.
    """

    def handler(execution: Any) -> None:
        with execution.atomic():
            publish("orders", {"order": 17}, type="order.paid")

    with claims_in(using, using=using):
        for times in (1, 2):
            call(handler, mode)
            assert Relay().drain() == 1
            assert len({message.id for message in broker.got}) == times
            records = IdempotencyKey.objects.using(using).filter(key="k", scope="s")
            assert records.delete()[0]
            if messages:
                OutboxMessage.objects.using(using).all().delete()


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
            call(handler)
    call(handler, **short)
    assert len({*ids}) == 1

    eventually(lambda: call(handler, **short) or len(ids) == 4)
    assert ids[3] != ids[0]
    assert OutboxMessage.objects.using(leased).count() == 2
