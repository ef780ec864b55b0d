"""The reference app's consumer: events over HTTP, from senders who are told apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from .clients import Api, Order
from .conftest import Server
from .databases import Database

pytestmark = pytest.mark.e2e

STRUCTURED = "application/cloudevents+json"


@pytest.fixture
def send(server: Server, api: Api) -> Callable[..., httpx.Response]:
    """Sends an event: in the structured mode, unless other headers and content are given."""

    def send(order: Order, /, headers: Any = (), content: Any = None, **members: Any) -> Any:
        sent = [
            ("Authorization", f"Token {order.token}"),
            ("Content-Type", STRUCTURED),
            ("X-Simulate", order.fault),
        ]
        return api.send(
            "/api/events/",
            order,
            headers=dict(sent) | dict(headers),
            content=content if content is not None else json.dumps(event(order, **members)),
        )

    return send


def event(order: Order, **members: Any) -> dict[str, Any]:
    """The event that asks for what an order asks for."""
    given = {"specversion": "1.0", "id": order.key, "source": "/shop", "type": "order.paid"}
    return {**given, "data": {"reference": order.reference}, **members}


def test_handled_once(api: Api, send: Any) -> None:
    """The first delivery is handled; each later one is a duplicate with the same result."""
    order = Order()
    first, again = send(order), send(order)
    assert (first.status_code, again.status_code) == (200, 200)
    result = first.json()["result"]
    assert result.pop("id")
    assert result == {"reference": order.reference, "amount": 100, "currency": "EUR"}
    assert first.json()["outcome"] == "handled"
    assert again.json() == {**first.json(), "outcome": "duplicate"}
    assert api.effects(order) == 1


def test_senders(api: Api, send: Any) -> None:
    """Two senders with one id each have their event handled, and read their own result."""
    order = Order()
    other = replace(order, token="bob-token")
    alices, bobs = send(order), send(other)
    assert [response.json()["outcome"] for response in (alices, bobs)] == ["handled", "handled"]
    assert alices.json()["result"]["id"] != bobs.json()["result"]["id"]
    assert send(other).json()["result"] == bobs.json()["result"]
    assert api.effects(order) == 2


def test_refused(api: Api, send: Any) -> None:
    """What is no event, or none that can be handled, is refused in words."""
    order = Order()
    for members, status, why in [
        ({"type": "order.lost"}, 422, "no handler"),
        ({"id": None}, 400, "no id"),
        ({"id": 7}, 400, "non-empty string"),
        ({"specversion": "0.3"}, 400, "specversion"),
        ({"data": {"reference": order.reference, "amount": -1}}, 400, "amount"),
        ({"data": None}, 400, "reference"),
    ]:
        response = send(order, **members)
        assert response.status_code == status, response.text
        assert why in response.text
    assert send(order, content="{").status_code == 400
    assert send(order, {"Authorization": "Token nobody"}).status_code == 401
    assert api.effects(order) == 0
    assert send(order).json()["outcome"] == "handled"
    mismatch = send(order, data={"reference": order.reference, "amount": 7})
    assert mismatch.status_code == 422
    assert api.effects(order) == 1


@pytest.mark.parametrize("moment", ["before-effect", "after-effect", "after-commit"])
def test_killed(api: Api, database: Database, send: Any, moment: str) -> None:
    """Killed at any moment: the sender's retry gets a response, and there is one effect."""
    order = Order()
    with pytest.raises(httpx.RemoteProtocolError):
        send(replace(order, fault=f"kill={moment}"))
    database.wait_until_idle()
    outcome = send(order).json()["outcome"]
    assert outcome == ("duplicate" if moment == "after-commit" else "handled")
    assert api.effects(order) == 1
