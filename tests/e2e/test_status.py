"""Long work: who asks again is told where to look (202), and finds out there."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest

from .clients import PAYOUTS, Api, Order

pytestmark = pytest.mark.e2e


def test_a_duplicate_is_told_where_the_status_is(api: Api) -> None:
    """While the first works, a duplicate gets 202; where that leads, its caller reads that it is in
    progress, and later that it is completed; then a retry gets the response.
    """
    order = Order(fault="sleep-ms=8000")  # for all that is asked meanwhile, however slowly
    with ThreadPoolExecutor(2) as pool:
        sent = [pool.submit(api.send, PAYOUTS, order) for _ in range(2)]
        early, late = wait(sent, return_when=FIRST_COMPLETED)
        (accepted,) = (one.result() for one in early)

        assert accepted.status_code == 202
        assert accepted.json() == {"status": "in_progress"}
        assert int(accepted.headers["Retry-After"]) >= 1
        status = accepted.headers["Location"]
        assert api.get(status).json() == {"status": "in_progress", "attempt": 1}
        (executed,) = (one.result() for one in late)

    assert executed.status_code == 201
    assert api.get(status).json() == {"status": "completed", "attempt": 1}
    assert api.send(PAYOUTS, order).json() == executed.json()
    assert api.effects(order) == 1
