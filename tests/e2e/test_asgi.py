"""The reference app under ASGI, where a client that leaves cancels what it asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from idempotency_django.testing import eventually

from .clients import PROTECTED, TRANSACTIONAL, Api, Order
from .conftest import Server, client_of
from .databases import Database

pytestmark = pytest.mark.e2e

CLIENTS = 20


@pytest.fixture
def api(asgi_server: Server) -> Iterator[Api]:
    with client_of(asgi_server) as api:
        yield api


@pytest.mark.parametrize("path", TRANSACTIONAL)
def test_sync_views_stay_transactional_under_asgi(api: Api, database: Database, path: str) -> None:
    """What a crash did not let commit leaves nothing behind, and no lease to wait for."""
    order = Order()
    api.killed(path, order, "after-effect")
    database.wait_until_idle()

    assert api.send(path, order).status_code == 201
    assert api.effects(order) == 1


@pytest.mark.parametrize("path", PROTECTED)
def test_a_client_that_leaves_at_any_moment_wedges_nothing(api: Api, path: str) -> None:
    """Whether it left before, amid or after the work, a retry gets a response, with one effect, and
    so does the next retry: sync and async views alike replay what they returned.
    """
    orders = [Order() for _ in range(CLIENTS)]

    def send_and_leave(number: int) -> None:
        order = orders[number]
        if number == 0:  # it is done
            api.send_and_leave(path, order, lambda: eventually(lambda: api.effects(order)))
        else:  # it has begun or not
            slow = replace(order, fault="sleep-ms=400")
            api.send_and_leave(path, slow, partial(time.sleep, 0.02 * number))

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(send_and_leave, range(CLIENTS)))
        responses = list(pool.map(lambda order: api.send_until_done(path, order), orders))

    assert [response.status_code for response in responses] == [201] * CLIENTS
    again = api.send(path, orders[0])
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.content == responses[0].content
    assert [api.effects(order) for order in orders] == [1] * CLIENTS
