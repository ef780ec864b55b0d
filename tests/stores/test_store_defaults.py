"""What a store that overrides only what it must does with batches, and says of itself."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from idempotency_django.policy.invocation import Invocation
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim, Record
from idempotency_django.testing import RESPONSE, an_operation

LEASE = timedelta(seconds=30)


class Store(MemoryStore):
    """A store with the defaults."""

    def __init__(self) -> None:
        super().__init__("plain")


def test_batch() -> None:
    """A batch is claimed and completed one by one, in its order."""
    store = Store()
    operations = [an_operation(key=key) for key in ("b", "a")]
    claims = [claim for claim in store.acquire_many(operations) if isinstance(claim, Claim)]
    assert [claim.key for claim in claims] == ["b", "a"]
    assert list(store.complete_many([(claim, RESPONSE) for claim in claims])) == [True, True]
    records = [record for record in store.acquire_many(operations) if isinstance(record, Record)]
    assert [record.payload for record in records] == [RESPONSE, RESPONSE]


def test_without_transactions() -> None:
    """A store without transactions promises nothing of them, and fences nobody."""
    store = Store()
    called: list[str] = []
    with store.transaction(), store.durable("it"):
        store.on_commit(lambda: called.append("now"))
    assert called == ["now"]
    claim: Any = store.acquire(an_operation(key="a", lease=LEASE))
    with pytest.raises(ImproperlyConfigured, match="has no transactions"):
        store.fenced(claim)
    assert store.recall(claim.operation) is None


def test_body_on_demand() -> None:
    """A body that is read at its first use is read once, and may be replaced unread."""
    reads: list[int] = []

    def read() -> bytes:
        reads.append(1)
        return b"sent"

    given: dict[str, Any] = {"name": "POST /", "principal": "", "method": "POST", "path": "/"}
    invocation = Invocation(**given, read=read)
    assert invocation.changed(read=lambda: b"other").body == b"other"
    assert reads == []
    assert invocation.changed(principal="user:1").body == b"sent"
    assert (invocation.body, reads) == (b"sent", [1])
    with pytest.raises(AttributeError):
        _ = invocation.nothing  # type: ignore[attr-defined]
