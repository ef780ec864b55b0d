"""Attempts are limited: what always fails is held for an operator, and not executed for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from idempotency_django import engine
from idempotency_django.engine import Executed, Held, Mismatched, Outcome, Result
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import Store
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim, Operation, Payload, Status
from idempotency_django.testing import an_operation
from tests.models import Effect
from tests.support.shared import effects

pytestmark = pytest.mark.django_db(transaction=True)

LEASE = timedelta(seconds=99)
WAYS: list[tuple[Callable[[str], Store], timedelta | None]] = [
    (DatabaseStore, None),
    (DatabaseStore, LEASE),
    (MemoryStore, LEASE),
]


@pytest.fixture(params=WAYS, ids=["transactional", "leased", "memory"])
def way(request: pytest.FixtureRequest) -> Any:
    """A store, and an operation of three attempts at most."""
    store, lease = request.param
    return store("default"), an_operation(lease=lease, max_attempts=3)


def reraise(error: Exception) -> Result:
    raise error


def run(store: Store, operation: Operation, execute: Callable[[Any], Result]) -> Outcome:
    return engine.run(store, operation, execute, reraise)


def explode(_: object) -> Result:
    Effect.objects.create(reference="attempt")
    raise LookupError("boom")


def succeed(_: object) -> Result:
    Effect.objects.create(reference="a")
    return Result("response", Payload(201, (), b"done"))


def fail_thrice(store: Store, operation: Operation) -> None:
    for _ in range(3):
        with pytest.raises(LookupError, match="boom"):
            run(store, operation, explode)


def held(store: Store, operation: Operation) -> bool:
    record = store.get(operation.key, operation.scope)
    return record is not None and record.held


def test_held_after_the_last_attempt(way: Any) -> None:
    """The third failure of three is the last: from then on nothing is executed."""
    store, operation = way
    fail_thrice(store, operation)
    left = effects()
    for _ in range(2):
        assert run(store, operation, succeed) == Held()
    assert isinstance(run(store, replace(operation, fingerprint="0" * 64), succeed), Mismatched)
    assert effects() == left
    assert held(store, operation)


def test_not_before(way: Any) -> None:
    """An attempt before the last one frees the key, and the last one may succeed."""
    store, operation = way
    for _ in range(2):
        with pytest.raises(LookupError):
            run(store, operation, explode)
        assert not held(store, operation)
    assert run(store, operation, succeed) == Executed("response")


def interrupt(store: Store, operation: Operation) -> Claim:
    """An attempt whose process died."""
    claim = store.acquire(replace(operation, lease=LEASE))
    assert isinstance(claim, Claim)
    assert store.extend(claim, -1)
    return claim


@pytest.mark.parametrize("store", [DatabaseStore, MemoryStore])
def test_interruptions_count(store: Callable[[str], Store]) -> None:
    """After three interruptions of three, nobody executes it a fourth time."""
    one, operation = store("default"), an_operation(lease=LEASE, max_attempts=3)
    for attempt in (1, 2, 3):
        assert interrupt(one, operation).attempt == attempt
    assert run(one, operation, succeed) == Held()
    assert run(one, operation, succeed) == Held()
    assert effects() == 0
    assert held(one, operation)


def test_interruption_in_the_transactional_mode() -> None:
    """What a transaction left behind by ending in the middle counts there as well."""
    store, operation = DatabaseStore("default"), an_operation(max_attempts=1)
    interrupt(store, operation)
    assert run(store, operation, succeed) == Held()
    assert effects() == 0
    assert held(store, operation)


@pytest.mark.parametrize("lease", [None, LEASE])
def test_released_by_an_operator(lease: timedelta | None) -> None:
    """A release gives one attempt more; if that fails as well, the key is held again."""
    store, operation = DatabaseStore("default"), an_operation(lease=lease, max_attempts=3)
    fail_thrice(store, operation)
    row = IdempotencyKey.objects.get()
    assert (row.status, row.attempt, row.hold) == (Status.IN_PROGRESS, 3, True)
    assert "boom" in row.error
    release = {"status": Status.FAILED, "lease_expires_at": None, "owner_token": "x" * 32}
    for attempt in (4, 5):
        with transaction.atomic():
            IdempotencyKey.objects.update(**release)
        with pytest.raises(LookupError):
            run(store, operation, explode)
        assert IdempotencyKey.objects.get().attempt == attempt
        assert run(store, operation, succeed) == Held()
    IdempotencyKey.objects.update(**release)
    assert run(store, operation, succeed) == Executed("response")
    assert IdempotencyKey.objects.get().status == Status.COMPLETED
