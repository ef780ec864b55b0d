"""What becomes of an operation whose process is killed with SIGKILL."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle, islice

import httpx
import pytest

from .clients import ASYNC, PAYOUTS, TRANSACTIONAL, Api, Order
from .databases import Database

pytestmark = pytest.mark.e2e

MOMENTS = ("before-effect", "after-effect", "after-commit")
CLIENTS = 20
ATTEMPTS = 200


@pytest.mark.parametrize("path", TRANSACTIONAL)
@pytest.mark.parametrize(
    ("moment", "committed"),
    [("before-effect", False), ("after-effect", False), ("after-commit", True)],
)
def test_the_first_retry_after_a_crash_gets_a_response(
    api: Api, database: Database, path: str, moment: str, *, committed: bool
) -> None:
    """What was committed is replayed, what was not is executed; no retry is told to wait."""
    order = Order()
    api.killed(path, order, moment)
    database.wait_until_idle()
    assert api.effects(order) == committed

    retry = api.send(path, order)
    assert retry.status_code == 201
    assert ("Idempotent-Replayed" in retry.headers) is committed

    again = api.send(path, order)
    assert again.status_code == 201
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.content == retry.content
    assert api.effects(order) == 1


def test_what_a_crash_left_is_resumed_when_its_lease_is_over(api: Api, database: Database) -> None:
    """Where the claim outlives the process, a retry is told to wait, then finishes the job: the
    effect is there once, whether or not it was made before the crash.
    """
    crashed = {}
    for path in (PAYOUTS, ASYNC):
        for moment in MOMENTS:
            order = Order()
            crashed[order] = path
            api.killed(path, order, moment)
            database.wait_until_idle()
            assert api.effects(order) == (moment == "after-commit")

    with ThreadPoolExecutor(len(crashed)) as pool:
        responses = pool.map(lambda order: api.send_until_done(crashed[order], order), crashed)
    for response in responses:
        assert response.status_code == 201
        assert "Idempotent-Replayed" not in response.headers
    for order, path in crashed.items():
        assert api.send(path, order).headers["Idempotent-Replayed"] == "true"
        assert api.effects(order) == 1


def send_until_done(api: Api, order: Order) -> None:
    """Send the order as an honest client does: again and again, until it gets 201."""
    for _ in range(ATTEMPTS):
        try:
            response = api.send("/api/charges/", order)
        except httpx.TransportError:
            order = replace(order, fault="")
            continue
        if response.status_code == 201:
            return
        assert response.status_code == 409
        time.sleep(0.05)  # less patient than Retry-After asks for
    raise AssertionError(f"{order} got no response in {ATTEMPTS} attempts.")


def test_crashes_amid_traffic_lose_and_double_nothing(api: Api) -> None:
    """While processes die under them, clients who retry cause exactly one effect each."""
    faults = islice(cycle(["", *(f"kill={moment}" for moment in MOMENTS)]), CLIENTS)
    orders = [Order(fault=fault) for fault in faults]

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda order: send_until_done(api, order), orders))

    assert [api.effects(order) for order in orders] == [1] * CLIENTS
