"""The reference app's outbox: a request in one process, and its message in another."""

from __future__ import annotations

import pytest

from idempotency_django.testing import eventually

from .clients import Api, Order

pytestmark = pytest.mark.e2e

PUBLISHED = "/api/published/"


def kinds(api: Api, order: Order) -> dict[str, int]:
    """How many effects there are of each kind."""
    asked = {"reference": order.reference}
    counted: dict[str, int] = api.get("/effects/", params=asked).json()["kinds"]
    return counted


BOTH = {"published": 1, "consumed": 1}


def test_consumed_elsewhere(api: Api) -> None:
    """A request has its effect, and its message has one in another process; a retry adds none."""
    order, next_order = Order(), Order()
    first = api.send(PUBLISHED, order)
    assert first.status_code == 201
    again = api.send(PUBLISHED, order)
    assert again.content == first.content
    eventually(lambda: kinds(api, order) == BOTH)
    # Alice's messages are of one group: when the next one is there, no other of the first can come.
    api.send(PUBLISHED, next_order)
    eventually(lambda: kinds(api, next_order) == BOTH)
    assert kinds(api, order) == BOTH


@pytest.mark.parametrize(("moment", "left"), [("after-effect", {}), ("after-commit", BOTH)])
def test_crash(api: Api, moment: str, left: dict[str, int]) -> None:
    """What was committed before a crash is published, though no response came; nothing else is."""
    order = Order()
    api.killed(PUBLISHED, order, moment)
    if left:
        eventually(lambda: kinds(api, order) == left)
    assert kinds(api, order) == left
    assert api.send(PUBLISHED, order).status_code == 201
    eventually(lambda: kinds(api, order) == BOTH)
