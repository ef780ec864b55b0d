"""The address of an operation's status: one for each operation and caller."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from idempotency_django.http import status
from idempotency_django.stores import stores
from idempotency_django.stores.records import Claim, Operation

pytestmark = pytest.mark.urls("tests.http.test_status")

NAMED = {
    "key": "order-17-of-alice",
    "scope": "user:42|POST /api/charges/",
    "principal": "user:42",
    "fingerprint": "f" * 64,
}


@pytest.fixture(autouse=True)
def _setup(settings: Any) -> None:
    memory = {"BACKEND": "idempotency_django.stores.memory.MemoryStore"}
    settings.IDEMPOTENCY = {"STATUS_VIEW": "operations:plain", "STORES": {"default": memory}}


def token(**changes: Any) -> str:
    """The token in the address of an operation's status."""
    operation = Operation(**{**NAMED, **changes}, name="POST /", ttl=timedelta(hours=1))
    return (
        status.location(stores["default"], operation, operation.principal)
        .rstrip("/")
        .rsplit("/", 1)[1]
    )


def test_one_address() -> None:
    """An operation has one address, whoever asks again; every other operation has another."""
    assert token() == token()
    others = [token(**{name: value[:-1] + "x"}) for name, value in NAMED.items()]
    assert len({token(), *others}) == 5


def test_rotation_meanwhile() -> None:
    """A duplicate after a rotation of SECRET_KEY gets an address of the record from before it."""
    store = stores["default"]
    operation = Operation(**NAMED, name="POST /", ttl=timedelta(hours=1))
    assert isinstance(store.acquire(operation), Claim)
    duplicate = replace(
        operation, fingerprint="e" * 64, former_fingerprints=(operation.fingerprint,)
    )
    location = status.location(store, duplicate, duplicate.principal)
    found = status.record_of(location.rstrip("/").rsplit("/", 1)[1], {NAMED["principal"]})
    assert found is not None
    assert found.status == "in_progress"
