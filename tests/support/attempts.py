"""Attempts at operations by the engine alone, and what happens to their leases meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

from django.utils import timezone

from idempotency_django import engine
from idempotency_django.engine import Outcome, Result
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import Store
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim, Operation, Payload, Record
from idempotency_django.testing import an_operation, eventually

LEASE = timedelta(seconds=30)
STORED = Payload(201, (("Location", "/e/1"),), b"done")
"""What each attempt stores as its response."""


def leased(**changes: Any) -> Operation:
    """An operation in leased mode."""
    return an_operation(**({"lease": LEASE} | changes))


def attempt(
    store: Store,
    operation: Operation,
    handler: Callable[[ExecutionContext], object],
    recover: Callable[[Exception], Result] = engine.reraise,
    *,
    around: AbstractContextManager[Any] | None = None,
    together: bool = False,
    **changes: Any,
) -> Outcome:
    """One attempt, whose response is the handler's result, or what it returns as its response."""

    def execute(execution: ExecutionContext) -> Result:
        with around or nullcontext():
            made = handler(execution)
        return made if isinstance(made, Result) else Result(made, STORED)

    return engine.run(store, replace(operation, **changes), execute, recover, together=together)


async def aattempt(
    store: Store, operation: Operation, handler: Callable[[ExecutionContext], Awaitable[object]]
) -> Outcome:
    """The same of a coroutine function."""

    async def execute(execution: ExecutionContext) -> Result:
        return Result(await handler(execution), STORED)

    return await engine.arun(store, operation, execute, engine.reraise)


def found(store: Store, operation: Operation) -> Record:
    """The operation's record."""
    record = store.get(operation.key, operation.scope)
    assert record is not None
    return record


def interrupt(store: Store, operation: Operation) -> None:
    """Let the lease of the operation be over, whatever its owner believes."""
    if isinstance(store, MemoryStore):
        store._entries[operation.key, operation.scope].lease_ends = 0
    else:
        rows = IdempotencyKey.objects.using(store.using).filter(key=operation.key)
        assert rows.update(lease_expires_at=timezone.now() - timedelta(hours=1)) == 1


def taken_over(store: Store, operation: Operation) -> Claim:
    """The claim of the successor of an owner that is still at work."""
    acquired: list[Claim | Record] = []

    def claimed() -> bool:
        interrupt(store, operation)
        acquired[:] = [store.acquire(operation)]
        return isinstance(acquired[0], Claim)  # unless the heartbeat came between the two

    eventually(claimed)
    [claim] = acquired
    assert isinstance(claim, Claim)
    return claim
