"""Long work: who asks again is told where to look (202), and finds out there."""

from __future__ import annotations

import json
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import httpx
import pytest

from .clients import PAYOUTS, Api, Order

pytestmark = pytest.mark.e2e


def status(api: Api, accepted: httpx.Response, token: str = "alice-token") -> httpx.Response:
    headers = {"Authorization": f"Token {token}"}
    return api.get(accepted.headers["Location"], headers=headers)


def test_a_duplicate_is_told_where_the_response_will_be(api: Api) -> None:
    """While the first works, a duplicate gets 202; where that leads, its caller alone reads
    that it is in progress, and later the response that the first received.
    """
    order = Order(fault="sleep-ms=8000")  # for all that is asked meanwhile, however slowly
    with ThreadPoolExecutor(2) as pool:
        sent = [pool.submit(api.send, PAYOUTS, order) for _ in range(2)]
        early, late = wait(sent, return_when=FIRST_COMPLETED)
        (accepted,) = (one.result() for one in early)

        assert accepted.status_code == 202
        assert accepted.json() == {"status": "in_progress"}
        assert int(accepted.headers["Retry-After"]) >= 1
        assert status(api, accepted).json() == {"status": "in_progress", "attempt": 1}
        assert status(api, accepted, "bob-token").status_code == 404
        (executed,) = (one.result() for one in late)

    assert executed.status_code == 201
    told = status(api, accepted).json()
    assert told["status"] == "completed"
    assert told["response"]["status"] == 201
    assert json.loads(told["response"]["body"]) == executed.json()
    assert ["Location", executed.headers["Location"]] in told["response"]["headers"]
    assert status(api, accepted, "bob-token").status_code == 404
    assert api.effects(order) == 1
