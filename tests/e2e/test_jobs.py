"""Requests that leave their work to a Celery task."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from idempotency_django.testing import eventually

from .clients import Api, Order
from .conftest import Serve, Server, client_of

pytestmark = pytest.mark.e2e

JOBS = "/api/jobs/"


def _answered(api: Api, order: Order) -> int:
    """The status of a retry, when the lease of the server that died is over."""
    eventually(lambda: api.send(JOBS, order).status_code != 409)
    return api.send(JOBS, order).status_code


def test_at_once_without_a_broker(api: Api) -> None:
    """Without a broker the task runs in the process that serves; a retry runs no second one."""
    order = Order()
    first, retry = (api.send(JOBS, order) for _ in range(2))
    assert first.status_code == 202
    assert first.json()["task"]
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert retry.json() == first.json()
    assert api.effects(order) == 1


def test_killed_after_sending(api: Api) -> None:
    """A server that dies when it has sent the task sends it again at the retry, with its id."""
    order = Order()
    api.killed(JOBS, order, "after-effect")
    assert _answered(api, order) == 202
    assert api.effects(order) == 1


@pytest.fixture(scope="module")
def jobs_server(serve: Serve, valkey_url: str) -> Iterator[Server]:
    """The reference app with a broker, and a worker that ends with it."""
    with serve(BROKER_URL=valkey_url.replace("/0", "/5")) as server:
        yield server


@pytest.mark.nightly
def test_with_a_worker(jobs_server: Server) -> None:
    """A worker, which the server has started, does the work once."""
    order = Order()
    with client_of(jobs_server) as api:
        api.killed(JOBS, order, "after-effect")
        assert _answered(api, order) == 202
        eventually(lambda: api.effects(order))
        other = Order()
        api.send(JOBS, other)
        eventually(lambda: api.effects(other))
        assert api.effects(order) == 1
