"""Whether a store that was too busy knows that an operation is in progress."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.conf import settings
from django.db import DatabaseError, OperationalError, connections, transaction

from idempotency_django.errors import StoreUnavailable
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim
from idempotency_django.testing import RESPONSE, an_operation

ALIASES = list(settings.ALIASES.values())

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.parametrize("using", ALIASES, ids=list(settings.ALIASES)),
]


def test_leased(using: str) -> None:
    """An operation is running while its claim is committed and not completed."""
    store = DatabaseStore("default", using=using)
    operation = an_operation(lease=timedelta(minutes=1))
    assert store.is_running(operation) is False
    claim = store.acquire(operation)
    assert isinstance(claim, Claim)
    assert store.is_running(operation) is True
    assert store.complete(claim, RESPONSE)
    assert store.is_running(operation) is False


def test_broken_transaction(using: str) -> None:
    """A transaction that must roll back cannot be asked: nothing is known to run."""
    store = DatabaseStore("default", using=using)
    with transaction.atomic(using=using):
        transaction.set_rollback(True, using=using)
        assert store.is_running(an_operation()) is False


def test_unreachable(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that does not reply knows of nothing that runs."""
    store = DatabaseStore("default", using=using)

    def away(*_: object) -> None:
        raise StoreUnavailable

    monkeypatch.setattr(store, "get", away)
    assert store.is_running(an_operation()) is False


def test_other_stores(using: str) -> None:
    """A store that is never locked as a whole takes a busy operation to run."""
    store = MemoryStore("memory")
    assert store.is_running(an_operation()) is True
    for error in (OperationalError(), DatabaseError()):
        assert not store.was_ended_by_server(error)
        assert not store.is_busy(error)
    assert [*store.check_live()] == []
    assert connections[using].alias == using
