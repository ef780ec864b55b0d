"""The reference app's consumer: events over HTTP, from senders who are told apart."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest

from .clients import Api, Order
from .databases import Database

pytestmark = pytest.mark.e2e


def send(api: Api, order: Order) -> httpx.Response:
    """Send an event, in the structured mode, that asks for what an order asks for."""
    event = {
        "specversion": "1.0",
        "id": order.key,
        "source": "/shop",
        "type": "order.paid",
        "data": {"reference": order.reference},
    }
    headers = {
        "Authorization": f"Token {order.token}",
        "Content-Type": "application/cloudevents+json",
        "X-Simulate": order.fault,
    }
    return api.send("/api/events/", order, headers=headers, content=json.dumps(event))


def test_handled_once(api: Api) -> None:
    """The first delivery is handled; each later one is a duplicate with the same result."""
    order = Order()
    first, again = send(api, order), send(api, order)
    assert (first.status_code, again.status_code) == (200, 200)
    result = first.json()["result"]
    assert result.pop("id")
    assert result == {"reference": order.reference, "amount": 100, "currency": "EUR"}
    assert first.json()["outcome"] == "handled"
    assert again.json() == {**first.json(), "outcome": "duplicate"}
    assert api.effects(order) == 1


@pytest.mark.parametrize("moment", ["before-effect", "after-effect", "after-commit"])
def test_killed(api: Api, database: Database, moment: str) -> None:
    """Killed at any moment: the sender's retry gets a response, and there is one effect."""
    order = Order()
    with pytest.raises(httpx.RemoteProtocolError):
        send(api, replace(order, fault=f"kill={moment}"))
    database.wait_until_idle()
    outcome = send(api, order).json()["outcome"]
    assert outcome == ("duplicate" if moment == "after-commit" else "handled")
    assert api.effects(order) == 1
