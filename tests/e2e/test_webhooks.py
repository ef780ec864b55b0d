"""The reference app's webhooks: stored at once, handled in the background, one effect each."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from idempotency_django.contrib.messaging import StandardWebhooks, Stripe, Verifier
from idempotency_django.testing import eventually
from testproject import settings

from .clients import Api, Order
from .conftest import Server

pytestmark = pytest.mark.e2e

VERIFIERS: dict[str, Verifier] = {
    "standard": StandardWebhooks([settings.WEBHOOK_SECRET]),
    "stripe": Stripe([settings.STRIPE_WEBHOOK_SECRET]),
}
senders = pytest.mark.parametrize("sender", VERIFIERS)


def body_of(sender: str, order: Order, **changes: Any) -> bytes:
    """What the sender sends about an order."""
    asked = {"reference": order.reference, **changes}
    if sender == "standard":
        return json.dumps({"type": "order.paid", "data": asked}).encode()
    data = {"object": {"id": "in_1", "object": "invoice", "metadata": asked}}
    event = {"id": f"evt_{order.key}", "object": "event", "type": "invoice.paid", "data": data}
    return json.dumps(event).encode()


@pytest.fixture
def deliver(server: Server, api: Api) -> Callable[..., httpx.Response]:
    """Delivers a webhook about an order."""

    def deliver(sender: str, order: Order, body: bytes = b"", **headers: str) -> httpx.Response:
        body = body or body_of(sender, order)
        signed = VERIFIERS[sender].sign(body, message_id=f"msg_{order.key}")
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return api.send(
            f"/webhooks/{sender}/",
            order,
            content=body,
            headers={"Content-Type": "application/json", **signed, **named},
        )

    return deliver


@senders
def test_one_effect(api: Api, deliver: Any, sender: str) -> None:
    """A webhook that is delivered three times has one effect."""
    order = Order()
    assert [deliver(sender, order).status_code for _ in range(3)] == [200] * 3
    eventually(lambda: api.effects(order, "webhook") == 1)
    assert deliver(sender, order).status_code == 200
    other = Order()  # once it has its effect, the first one had every chance of a second
    deliver(sender, other)
    eventually(lambda: api.effects(other, "webhook") == 1)
    assert api.effects(order) == 1


@senders
def test_refused(api: Api, deliver: Any, sender: str) -> None:
    """What is not signed with the secret is refused and has no effect, whatever it is."""
    order, other = Order(), Order()
    signature = {"standard": "webhook_signature", "stripe": "Stripe_Signature"}[sender]
    for value in ("", "v1,AAAA", "t=1,v1=00", "?"):
        assert deliver(sender, order, **{signature: value}).status_code == 401
    for body in (b"", b"\xff", b"{}"):
        unsigned = api.send(f"/webhooks/{sender}/", order, content=body, headers={})
        assert unsigned.status_code == 401
    deliver(sender, other)
    eventually(lambda: api.effects(other) == 1)
    assert api.effects(order) == 0
