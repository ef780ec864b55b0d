"""Invoices with versions and transitions, and one payment per order, over real HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import uuid4

import httpx
import pytest

from .clients import Api, Order
from .databases import Database
from .test_endpoints import is_replay, problem

pytestmark = pytest.mark.e2e
CLIENTS = 30


def create(api: Api, order: Order) -> str:
    """The path of a new invoice."""
    response = api.send("/api/invoices/", order)
    told = response.json()
    path = response.headers["Location"]
    assert path == f"/api/invoices/{told.pop('id')}/"
    assert (response.status_code, response.headers["ETag"]) == (201, etag(path, 1))
    assert told == {"reference": order.reference, "amount": 100, "currency": "EUR", "version": 1}
    assert api.effects(order, "invoice") == 1
    return path


def etag(path: str, version: int) -> str:
    """The ETag of the invoice at a path."""
    return f'"{path.split("/")[-2]}.{version}"'


def another(order: Order, **changes: object) -> Order:
    """The same order with a key of its own."""
    return replace(order, key=str(uuid4()), **changes)  # type: ignore[arg-type]


def test_one_of_many_changes(api: Api) -> None:
    """Of thirty PUTs with one ETag, one wins and the others get 412; an ETag is required."""
    order = Order()
    path = create(api, order)
    assert problem(api.request("PUT", path, another(order))) == "precondition-required"
    changes = [another(order, amount=amount) for amount in range(CLIENTS)]
    first = etag(path, 1)
    with ThreadPoolExecutor(CLIENTS) as pool:
        responses = list(
            pool.map(lambda change: api.request("PUT", path, change, If_Match=first), changes)
        )
    statuses = [response.status_code for response in responses]
    assert (statuses.count(200), statuses.count(412)) == (1, CLIENTS - 1)
    winner = statuses.index(200)
    told = api.request("GET", path, order).json()
    assert (told["amount"], told["version"]) == (winner, 2)
    retry = api.request("PUT", path, changes[winner], If_Match=first)
    assert is_replay(retry)
    assert retry.status_code == 200


@pytest.mark.parametrize(
    ("moment", "committed"), [("before-effect", 0), ("after-effect", 0), ("after-commit", 1)]
)
def test_killed_while_it_is_paid(api: Api, database: Database, moment: str, committed: int) -> None:
    """A worker that is killed leaves all of the transition or nothing; a retry has one effect."""
    order = Order()
    path = create(api, order)
    api.killed(f"{path}pay/", another(order), moment)
    database.wait_until_idle()
    assert api.effects(order, "paid") == committed
    assert api.send(f"{path}pay/", another(order)).status_code == 200
    assert api.effects(order, "paid") == 1


def pay(api: Api, order: Order, amount: int = 100, **instead: str | None) -> httpx.Response:
    body = json.dumps({"order": order.reference, "amount": amount}).encode()
    sent = replace(another(order), **instead)  # type: ignore[arg-type]
    return api.send("/api/payments/", sent, content=body)


def test_one_of_many_payments(api: Api) -> None:
    """Of thirty payments of one order, one has its effect; the others get it, or 409.

    Another amount, or another caller, is refused.
    """
    order = Order()
    with ThreadPoolExecutor(CLIENTS) as pool:
        responses = list(pool.map(lambda _: pay(api, order), range(CLIENTS)))
    assert {response.status_code for response in responses} <= {201, 409}
    assert len({response.content for response in responses if response.status_code == 201}) == 1
    for refused in (pay(api, order, 200), pay(api, order, token="bob-token")):
        assert (refused.status_code, problem(refused)) == (422, "mismatch")
    assert api.effects(order, "payment") == 1
