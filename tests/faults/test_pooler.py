"""PgBouncer in transaction mode: a connection is another one's after each transaction."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from idempotency_django.testing import PATIENCE
from tests.support.nightly import few, sizes

from .faulty_servers import find_pgbouncer, pgbouncer
from .ledger import Ledger
from .processes import Caller, Ended, Order, forks, site
from .recovery import DRF, LEASED, STEPPED, TRANSACTIONAL, Bank, Mode, assert_done_once
from .state import State

pytestmark = pytest.mark.e2e

MODES = (TRANSACTIONAL, DRF, LEASED, STEPPED)
SITES, DUPLICATES = 2, 20


@pytest.fixture(scope="module")
def pooled(state: State) -> Iterator[str]:
    """The URL of the database through a pool that is smaller than the number of clients."""
    program = find_pgbouncer()
    if program is None:
        pytest.skip("pgbouncer is NOT INSTALLED")
    with pgbouncer(state.database, program) as url:
        yield url


@pytest.fixture
def sites(pooled: str, ledger: Ledger, log: Path) -> Iterator[list[int]]:
    """The ports of processes that keep their connections to the pool."""
    with ExitStack() as stack:
        served = [site(pooled, ledger.url, log, CONN_MAX_AGE="600") for _ in range(SITES)]
        yield [stack.enter_context(each) for each in served]


@pytest.mark.parametrize("keys", sizes(2, 10))
@pytest.mark.parametrize("mode", few(MODES), ids=str)
def test_duplicates_through_a_pool(
    sites: list[int], state: State, ledger: Ledger, mode: Mode, keys: int
) -> None:
    """Of duplicates at once, through few connections, one is executed; the others receive its
    response, or are told to come back, and receive it then. None fails.
    """
    told: Counter[str] = Counter()
    for _ in range(keys):
        order = Order(mode.path)
        responses = _send_at_once(sites, order)
        (executed,) = (ended for ended in responses if ended.status == 201 and not ended.replayed)
        for ended in responses:
            assert ended.status == 409 or ended.body == executed.body, ended
            told[f"{ended.status}{' replayed' * ended.replayed}"] += 1
        for at in sites:
            late = _send(at, order)
            assert (late.replayed, late.body) == (True, executed.body)
        assert_done_once(mode, order, state, ledger)
    assert told["201"] == keys
    assert set(told) <= {"201", "201 replayed", "409"}


@pytest.mark.parametrize("stride", sizes(4, 1))
@pytest.mark.parametrize("mode", few([TRANSACTIONAL, STEPPED]), ids=str)
def test_crash_behind_a_pool(
    pooled: str, state: State, ledger: Ledger, log: Path, mode: Mode, stride: int
) -> None:
    """The claim of a process that dies is gone at once with its transaction, or when its lease is
    over, though the pool keeps the connection that it was made over.
    """
    with (
        forks(pooled, ledger.url, log) as workers,
        forks(pooled, ledger.url, log, **mode.undisturbed) as undisturbed,
    ):
        bank = Bank(workers, state, ledger)
        points = bank.boundaries(mode, undisturbed.send(Order(mode.path)))
        bank.assert_recovers(mode, points[::stride])


def _send(port: int, order: Order) -> Ended:
    with closing(Caller(port)) as caller:
        return caller.send(order)


def _send_at_once(sites: list[int], order: Order) -> list[Ended]:
    """The responses to as many duplicates, released together, over a connection each."""
    barrier = threading.Barrier(DUPLICATES, timeout=PATIENCE)

    def send(number: int) -> Ended:
        barrier.wait()
        return _send(sites[number % len(sites)], order)

    with ThreadPoolExecutor(DUPLICATES) as threads:
        return list(threads.map(send, range(DUPLICATES), timeout=PATIENCE))
