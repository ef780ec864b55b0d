"""A request that is sent within an execution has a key of that execution."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from idempotency_django import engine
from idempotency_django.client import OutcomeUnknown
from idempotency_django.engine import Result
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import Operation
from idempotency_django.testing import an_operation
from tests.support.attempts import attempt

from .drivers import AsyncHttpx, Httpx
from .scripted import CUT, Scripted

pytestmark = pytest.mark.django_db(transaction=True)

LEASE = an_operation().ttl


class Failed(Exception):
    """The attempt failed, and is made again."""


def attempts(operation: Operation, send: Callable[..., None]) -> None:
    """Two attempts, of which the first fails at the end."""

    def fails(execution: ExecutionContext) -> None:
        send(execution)
        raise Failed

    with pytest.raises(Failed):
        attempt(DatabaseStore("default"), operation, fails)
    attempt(DatabaseStore("default"), operation, send)


@pytest.mark.parametrize("lease", [None, LEASE], ids=["transactional", "leased"])
def test_same_on_each_attempt(server: Scripted, lease: Any) -> None:
    """Each attempt sends the same keys, in the same order; another operation sends others."""

    def send(execution: ExecutionContext) -> None:
        for path in ("/charges/", "/charges/", "/mails/", "/charges/?at=12:00"):
            Httpx().send("POST", server.url + path)
        Httpx().send("PUT", server.url + "/charges/")

    attempts(an_operation(lease=lease), send)
    attempts(an_operation(lease=lease), send)

    first, second, third, fourth = (server.keys[start : start + 5] for start in (0, 5, 10, 15))
    assert first == second != third == fourth
    assert len({*first, *third}) == 10


def test_own_key_and_no_key(server: Scripted) -> None:
    """A request with a key of its own, or without one, takes no part in the count."""

    def send(execution: ExecutionContext) -> None:
        if not server.received:
            Httpx().send("POST", server.url, key="own")
            Httpx().send("POST", server.url, key=None)
            Httpx().send("GET", server.url)
        Httpx().send("POST", server.url)

    attempts(an_operation(), send)
    *others, first, second = server.keys
    assert others == ['"own"', None, None]
    assert first == second


def test_steps(server: Scripted) -> None:
    """Within a step, the requests of that step count; a resumed attempt sends the same keys."""

    def send(execution: ExecutionContext) -> None:
        def pay() -> None:
            Httpx().send("POST", server.url)

        execution.step("first", pay)
        execution.step("second", pay)
        Httpx().send("POST", server.url)

    attempts(an_operation(lease=LEASE), send)

    first, second, outside, again = server.keys
    assert outside == again
    assert len({first, second, outside}) == 3


def test_async(server: Scripted) -> None:
    """The same in async code; each of several requests at once has its own key."""
    keys: list[set[str | None]] = []

    async def once() -> None:
        async def handler(execution: ExecutionContext) -> Result:
            url = server.url
            await asyncio.gather(*(AsyncHttpx().asend("POST", url) for _ in range(3)))
            await sync_to_async(lambda: Httpx().send("POST", url))()
            raise Failed

        with pytest.raises(Failed):
            await engine.arun(DatabaseStore("default"), operation, handler, engine.reraise)

    operation = an_operation(lease=LEASE)
    for _ in range(2):
        asyncio.run(once())
        keys.append(set(server.keys))
        server.received.clear()
    assert keys[0] == keys[1]
    assert len(keys[0]) == 4


def test_lost_response(server: Scripted) -> None:
    """An attempt that lost the response leaves its key to the next attempt."""
    server.script = [CUT]

    def send(execution: ExecutionContext) -> None:
        Httpx(attempts=1).send("POST", server.url)

    operation = an_operation()
    with pytest.raises(OutcomeUnknown) as caught:
        attempt(DatabaseStore("default"), operation, send)
    attempt(DatabaseStore("default"), operation, send)
    assert server.keys == [f'"{caught.value.key}"'] * 2


def test_outside(server: Scripted) -> None:
    """Outside of an execution, each request has a random key."""
    for _ in range(2):
        Httpx().send("POST", server.url)
    assert len(set(server.keys)) == 2
