"""The connection is lost while something is being committed: so the result is unknown.

The commits are enumerated by a proxy before the database, which breaks the connection: each
``COMMIT``, and each statement that commits by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nightly import few

from .ledger import Ledger
from .processes import Ended, Order, Workers, workers
from .proxy import Cut, Proxy, proxy_to
from .recovery import (
    DRF,
    LEASED,
    ONE_BY_ONE,
    STEPPED,
    STEPPED_ONE_BY_ONE,
    TRANSACTIONAL,
    TRANSACTIONAL_REQUEST,
    Bank,
    Mode,
)
from .state import State

pytestmark = pytest.mark.e2e

COMMITS = {
    TRANSACTIONAL: 1,
    ONE_BY_ONE: 1,
    DRF: 1,
    TRANSACTIONAL_REQUEST: 1,
    LEASED: 4,  # the claim, the step, the atomic block, the response
    STEPPED: 5,  # the claim, three steps, the response
    STEPPED_ONE_BY_ONE: 5,
}
"""How many there are in an execution."""

LEASE = "4"
"""Seconds; so long that it is not over, even where all this takes its time."""


@pytest.fixture(scope="module")
def proxy(state: State) -> Iterator[Proxy]:
    with proxy_to(state.url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def with_environment(proxy: Proxy, ledger: Ledger, log_of_all: Path) -> Iterator[Workers]:
    with workers(proxy.url, ledger.url, log_of_all) as with_environment:
        yield with_environment


@pytest.fixture
def bank(mode: Mode, with_environment: Workers, state: State, ledger: Ledger, shown: None) -> Bank:
    return Bank(with_environment({**mode.environment, "LEASE_SECONDS": LEASE}), state, ledger)


@pytest.mark.parametrize("mode", few(COMMITS), ids=str)
def test_connection_lost_at_every_commit(bank: Bank, proxy: Proxy, mode: Mode) -> None:
    """Whether what was sent was committed or not, the operation is done once, and what a client was
    told is what its retry is told, at once or when the lease is over.
    """
    proxy.watch()
    assert bank.forks.send(Order(mode.path)).status == 201
    assert len(proxy.commits) == COMMITS[mode], proxy.commits
    told: dict[Order, Ended] = {}
    for cut in [Cut(number, done) for number in range(COMMITS[mode]) for done in (False, True)]:
        order = Order(mode.path)
        proxy.watch(cut)
        told[order] = bank.forks.send(order)
        assert proxy.was_cut.is_set()
        assert told[order].status in {201, 500, 503}
        if mode.transactional:
            assert told[order].status != 201  # nobody knows that it was
        if mode in (TRANSACTIONAL, ONE_BY_ONE, DRF):  # and the client is told so
            assert told[order].status == 503
            assert "so the result is unknown" in told[order].body
        bank.state.database.wait_until_idle()
        proxy.watch()
        bank.assert_retried_at_once(mode, order)

    bank.state.wait_for_end_of_leases()
    for order, first in told.items():
        response = bank.assert_recovered(mode, order)
        assert first.status != 201 or first.body == response.body
