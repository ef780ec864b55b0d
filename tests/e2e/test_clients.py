"""The clients through a network that fails, and the effects in the server's database."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import stripe

from idempotency_django.backoff import Backoff
from idempotency_django.client import (
    AsyncIdempotentClient,
    IdempotentClient,
    OutcomeUnknown,
    RetryBudget,
)
from tests.support.nightly import sizes

from .clients import Api, Order
from .conftest import Server, client_of
from .network import faulty_network

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("database", ["postgres"], indirect=True),
]

PATH = "/api/charges/"
AT_ONCE = 8
TIMEOUT = 1.0  # seconds
OPTIONS: dict[str, Any] = {
    "attempts": 4,
    "backoff": Backoff(timedelta(milliseconds=1), timedelta(milliseconds=20)),
}
HTTPX: dict[str, Any] = {"timeout": TIMEOUT, "trust_env": False, "verify": False}
UNKNOWN = 0

Outcomes = dict[str, int]
"""The final status of each order, by its reference, or ``UNKNOWN``."""
Send = Callable[[str, list[Order], RetryBudget], Outcomes]


def _in_threads(orders: list[Order], send: Callable[[Order], int]) -> Outcomes:
    def outcome(order: Order) -> int:
        try:
            return send(order)
        except OutcomeUnknown:
            return UNKNOWN

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {
            order.reference: status
            for order, status in zip(orders, pool.map(outcome, orders), strict=True)
        }


def by_httpx(url: str, orders: list[Order], budget: RetryBudget) -> Outcomes:
    with IdempotentClient(base_url=url, budget=budget, **OPTIONS, **HTTPX) as client:
        return _in_threads(orders, lambda order: _post(client, order).status_code)


def by_async_httpx(url: str, orders: list[Order], budget: RetryBudget) -> Outcomes:
    async def send() -> Outcomes:
        outcomes, free = Outcomes(), asyncio.Semaphore(AT_ONCE)
        options = {"budget": budget, **OPTIONS, **HTTPX}
        async with AsyncIdempotentClient(base_url=url, **options) as client:

            async def one(order: Order) -> None:
                async with free:
                    try:
                        outcomes[order.reference] = (await _post(client, order)).status_code
                    except OutcomeUnknown:
                        outcomes[order.reference] = UNKNOWN

            await asyncio.gather(*map(one, orders))
        return outcomes

    return asyncio.run(send())


def _post(client: Any, order: Order) -> Any:
    headers = [(name, value) for name, value in order.headers if name != "Idempotency-Key"]
    extensions = {"idempotency_key": order.key}
    return client.post(PATH, content=order.body, headers=headers, extensions=extensions)


@pytest.fixture
def quick_stripe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripe.HTTPClient, "INITIAL_DELAY", 0.01)
    monkeypatch.setattr(stripe.HTTPClient, "MAX_DELAY", 0.02)


@pytest.mark.parametrize("size", sizes(60, 2000, "CLIENT_REQUESTS"))
@pytest.mark.parametrize("send", [by_httpx, by_async_httpx])
def test_faults(server: Server, send: Send, size: int) -> None:
    """No operation is executed twice, and each outcome is known, or known to be unknown."""
    orders = [Order() for _ in range(size)]

    with faulty_network(server.url) as network:
        outcomes = send(network.url, orders, RetryBudget(100_000))

    server.database.wait_until_idle()
    with client_of(server) as api:
        for order in orders:
            outcome, times = outcomes[order.reference], api.effects(order)
            assert outcome in (201, UNKNOWN)
            assert times == 1 if outcome == 201 else times <= 1, (order, outcome, times)
        _reconcile(api, send, orders, outcomes)
        assert {api.effects(order) for order in orders} == {1}
    assert network.requests > size


def _reconcile(api: Api, send: Send, orders: list[Order], outcomes: Outcomes) -> None:
    """Retry what is unknown with the same key, when the network is well again."""
    unknown = [order for order in orders if outcomes[order.reference] == UNKNOWN]
    again = send(api.url, unknown, RetryBudget()) if unknown else {}
    assert all(status == 201 for status in again.values()), again


@pytest.mark.usefixtures("quick_stripe")
def test_stripe(stripe_server: Server) -> None:
    """Stripe's own client gets replays, and its own error for a key that was used before."""
    client = stripe.StripeClient("alice-token", base_addresses={"api": stripe_server.url})
    order: Any = {"reference": uuid.uuid4().hex, "amount": 100, "currency": "EUR"}
    key: Any = {"idempotency_key": str(uuid.uuid4())}

    first, replay = (client.v1.charges.create(order, key) for _ in range(2))
    with pytest.raises(stripe.IdempotencyError, match="different request"):
        client.v1.charges.create({**order, "amount": 200}, key)

    assert first.id == replay.id
    assert replay.last_response
    assert replay.last_response.headers["Idempotent-Replayed"] == "true"
