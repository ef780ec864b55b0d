"""Consumers: each event has its effect once per consumer, whatever its transport does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.test import override_settings
from django_redis import get_redis_connection

from idempotency_django.contrib.messaging import Consumer, Duplicate, Event, Failed, Handled
from idempotency_django.contrib.messaging.errors import DeadLettered
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.stores.records import Claim
from idempotency_django.testing import eventually, in_threads
from tests.models import Effect
from tests.support.servers import Server
from tests.support.shared import effects

pytestmark = pytest.mark.django_db(transaction=True)

STORES = {
    "default": {"BACKEND": "idempotency_django.stores.database.DatabaseStore"},
    "memory": {"BACKEND": "idempotency_django.stores.memory.MemoryStore"},
}
WAYS = {
    "transactional": {},
    "leased": {"policy": Policy(mode="leased")},
    "memory": {"store": "memory"},
}


@pytest.fixture(autouse=True)
def _stores() -> Iterator[None]:
    with override_settings(IDEMPOTENCY={"STORES": STORES}):
        yield


@pytest.fixture(params=WAYS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


def paid(number: str = "1", /, **changes: Any) -> Event:
    """An event, as its sender makes it."""
    given = {"source": "/shop", "type": "order.paid", "data": {"reference": "a"}}
    return Event(**{"id": number, **given, **changes})


class Poison(Exception):
    """What a handler raises of an event that it cannot handle."""


def book(event: Event, execution: ExecutionContext) -> dict[str, Any]:
    """Make the effect; what is poison fails after it."""
    Effect.objects.create(reference=event.data["reference"])
    if event.data.get("poison"):
        raise Poison(event.id)
    return {"id": event.id, "attempt": execution.attempt}


def consumer(name: str = "billing", /, handler: Any = book, **options: Any) -> Consumer:
    """A consumer of events of the type ``order.paid``."""
    made = Consumer(name, **options)
    made.on("order.paid")(handler)
    return made


class TestOnce:
    def test_duplicate(self, options: dict[str, Any]) -> None:
        """The first delivery is handled; each later one gets its result."""
        billing = consumer(**options)
        result = {"id": "1", "attempt": 1}
        assert billing.handle(paid()) == Handled(result)
        for _ in range(2):
            assert billing.handle(paid()) == Duplicate(result)
        assert effects() == 1
        assert billing.handle(paid("2")) == Handled({"id": "2", "attempt": 1})
        assert effects() == 2

    def test_two_consumers(self, options: dict[str, Any]) -> None:
        """Two consumers of one event are both served."""
        for name in ("billing", "shipping"):
            assert isinstance(consumer(name, **options).handle(paid()), Handled)
        assert effects() == 2

    def test_two_sources(self) -> None:
        """An id is unique within its source, not beyond it."""
        billing = consumer()
        for source in ("/shop", "/shop:1", "/Shop", "/shop "):
            assert isinstance(billing.handle(paid(source=source)), Handled), source
        assert effects() == 4

    def test_interrupted_too_often(self) -> None:
        """An event whose attempts are used up by crashes is dead-lettered, in a batch as well."""
        billing = consumer(max_attempts=1, policy=Policy(lease=timedelta(milliseconds=1)))
        plan = billing._execution(paid("1"), "").plan
        claim = plan.store.acquire(replace(plan.operation, lease=plan.policy.lease))
        assert isinstance(claim, Claim)  # and its process dies
        eventually(IdempotencyKey.objects.interrupted().exists)
        outcomes = billing.handle_many([paid("0"), paid("1"), paid("2")])
        assert [type(outcome) for outcome in outcomes] == [Handled, Failed, Handled]
        assert isinstance(outcomes[1].error, DeadLettered)
        assert effects() == 2

    def test_concurrent_batches(self) -> None:
        """Batches that overlap, in any order, handle each event once, and none waits forever."""
        billing = consumer()
        numbers = list(range(20))
        shuffled = [numbers, numbers[::-1], numbers[10:] + numbers[:10]] * 2

        def deliver(order: list[int]) -> list[str]:
            outcomes = billing.handle_many([paid(f"{at}") for at in order])
            return [outcome.result["id"] for outcome in outcomes if isinstance(outcome, Handled)]

        handled = in_threads([lambda order=order: deliver(order) for order in shuffled])
        # Who found an event in progress tries again later, as its transport would.
        handled.append(deliver(numbers))
        assert sorted(each for ids in handled for each in ids) == sorted(f"{at}" for at in numbers)
        assert effects() == 20

    def test_federated(self) -> None:
        """A batch has one sender."""
        ledger = consumer("ledger", federated=True)
        ledger.handle_many([paid("1"), paid("2")], sender="peer-7")
        assert isinstance(ledger.handle(paid("2"), sender="peer-8"), Handled)
        assert isinstance(ledger.handle(paid("2"), sender="peer-7"), Duplicate)


def _raise_poison() -> None:
    raise Poison


@pytest.fixture
def redis(redis_server: Server) -> Iterator[None]:
    """Records in Valkey."""
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": redis_server.url}
    store = {"BACKEND": "idempotency_django.contrib.redis.RedisStore"}
    with override_settings(CACHES={"default": cache}, IDEMPOTENCY={"STORES": {"default": store}}):
        get_redis_connection("default").flushall()
        yield
        get_redis_connection("default").connection_pool.disconnect()


@pytest.mark.usefixtures("redis")
class TestRedis:
    """What the documentation says that a consumer can do with its records in Redis."""

    def test_once(self) -> None:
        """Each event is handled once; duplicates get the result, one by one and in a batch."""
        billing = consumer()
        assert isinstance(billing.handle(paid("1")), Handled)
        assert isinstance(billing.handle(paid("1"), redelivered=True), Duplicate)
        outcomes = billing.handle_many([paid("1"), paid("2"), paid("2")])
        assert [type(outcome) for outcome in outcomes] == [Duplicate, Handled, Duplicate]
        assert effects() == 2

    def test_dead(self) -> None:
        """What fails too often is held, and its neighbours are handled."""
        billing = consumer(max_attempts=2)
        poison = paid("2", data={"reference": "b", "poison": True})
        for error in (Poison, DeadLettered, DeadLettered):
            _, failed, _ = billing.handle_many([paid("1"), poison, paid("3")])
            assert isinstance(failed.error, error)
        assert effects("a") == 2

    def test_not_the_same_transaction(self) -> None:
        """What a handler wrote outside of a transaction of its own stays, when it fails."""
        with pytest.raises(Poison):
            consumer().handle(paid(data={"reference": "b", "poison": True}))
        assert effects("b") == 1

    def test_refused(self) -> None:
        """Steps, and the transactional mode, are refused by name."""

        def step(event: Event, execution: ExecutionContext) -> None:
            execution.step("charge", lambda: None)

        with pytest.raises(ImproperlyConfigured, match="doesn't support steps"):
            consumer("billing", step).handle(paid())
        with pytest.raises(ImproperlyConfigured, match="which has no transactions"):
            consumer(policy=Policy(mode="transactional")).handle(paid("2"))
        with (
            transaction.atomic(),
            pytest.raises(ImproperlyConfigured, match="open on the database"),
        ):
            consumer().handle(paid("3"))
