"""Attempts are limited: what always fails is held for an operator, and not executed for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from idempotency_django.engine import Executed, Held, Mismatched, Result
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import Store
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim, Operation, Payload, Status
from idempotency_django.testing import an_operation
from idempotency_django.testing.contract import as_claim
from tests.models import Effect
from tests.support.attempts import LEASE, attempt, found, interrupt
from tests.support.shared import effects

pytestmark = pytest.mark.django_db(transaction=True)

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


def explode(_: object) -> Result:
    Effect.objects.create(reference="attempt")
    raise LookupError("boom")


def succeed(_: object) -> Result:
    Effect.objects.create(reference="a")
    return Result("response", Payload(201, (), b"done"))


def is_held(store: Store, operation: Operation) -> bool:
    return found(store, operation).held


def fail_thrice(store: Store, operation: Operation) -> None:
    for _ in range(3):
        with pytest.raises(LookupError, match="boom"):
            attempt(store, operation, explode)


def test_held_after_the_last_attempt(way: Any) -> None:
    """The third failure of three is the last: from then on nothing is executed."""
    store, operation = way
    fail_thrice(store, operation)
    left = effects()
    for _ in range(2):
        assert attempt(store, operation, succeed) == Held()
    assert isinstance(attempt(store, replace(operation, fingerprint="0" * 64), succeed), Mismatched)
    assert effects() == left
    assert is_held(store, operation)


def die(store: Store, operation: Operation) -> Claim:
    """An attempt whose process died."""
    claim = as_claim(store.acquire(replace(operation, lease=LEASE)))
    interrupt(store, operation)
    return claim


@pytest.mark.parametrize("store", [DatabaseStore, MemoryStore])
def test_interruptions_count(store: Callable[[str], Store]) -> None:
    """After three interruptions of three, nobody executes it a fourth time."""
    one, operation = store("default"), an_operation(lease=LEASE, max_attempts=3)
    for number in (1, 2, 3):
        assert die(one, operation).attempt == number
    assert attempt(one, operation, succeed) == Held()
    assert attempt(one, operation, succeed) == Held()
    assert effects() == 0
    assert is_held(one, operation)


def test_interruption_in_the_transactional_mode() -> None:
    """What a transaction left behind by ending in the middle counts there as well."""
    store, operation = DatabaseStore("default"), an_operation(max_attempts=1)
    die(store, operation)
    assert attempt(store, operation, succeed) == Held()
    assert effects() == 0
    assert is_held(store, operation)


@pytest.mark.parametrize("lease", [None, LEASE])
def test_released_by_an_operator(lease: timedelta | None) -> None:
    """A release gives one attempt more; if that fails as well, the key is held again."""
    store, operation = DatabaseStore("default"), an_operation(lease=lease, max_attempts=3)
    fail_thrice(store, operation)
    row = IdempotencyKey.objects.get()
    assert (row.status, row.attempt, row.hold) == (Status.IN_PROGRESS, 3, True)
    assert "boom" in row.error
    release = {"status": Status.FAILED, "lease_expires_at": None, "owner_token": "x" * 32}
    for number in (4, 5):
        with transaction.atomic():
            IdempotencyKey.objects.update(**release)
        with pytest.raises(LookupError):
            attempt(store, operation, explode)
        assert IdempotencyKey.objects.get().attempt == number
        assert attempt(store, operation, succeed) == Held()
    IdempotencyKey.objects.update(**release)
    assert attempt(store, operation, succeed) == Executed("response")
    assert IdempotencyKey.objects.get().status == Status.COMPLETED
