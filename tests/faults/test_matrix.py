"""A process is killed at every boundary between two statements, and what it did is retried.

Without a step, a leased operation cannot promise one database effect: between the commit of an
effect and that of the response its process may die, and the retry does it again. So the effects are
where the promise holds: in the claim's own transaction, or in steps. What stands in
``request.idempotency.atomic()`` alone is of a kind that may be done twice.

The boundaries are enumerated on Django's own backends, see :mod:`tests.faults.numbering`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import databases
from tests.e2e.databases import Database
from tests.support.nightly import few, sizes

from .boundaries import Strike
from .ledger import Ledger
from .processes import Forks, Order, Workers, migrate, workers
from .recovery import ALL, FAILING, STEPPED, Bank, Mode
from .state import State

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("stride", sizes(4, 1))]
"""``make test`` takes each fourth boundary, ``make nightly`` all."""


@pytest.fixture(scope="module", params=few(["postgres", "mariadb", "sqlite"]))
def state(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A new database of each kind, with the bank's tables, and a look at what is in it."""
    if request.param not in os.environ["TEST_DATABASES"].split(","):
        pytest.skip(f"{request.param} is not among TEST_DATABASES")
    if request.param == "postgres":
        request.getfixturevalue("postgres_wanted")
    made: dict[str, Callable[[], AbstractContextManager[Database]]] = {
        "postgres": databases.postgres,
        "mariadb": databases.mariadb,
        "sqlite": lambda: databases.sqlite(tmp_path_factory.mktemp("sqlite")),
    }
    with made[request.param]() as database:
        migrate(database.url)
        with State(database) as state:
            yield state


@pytest.fixture(scope="module")
def with_environment(state: State, ledger: Ledger, log_of_all: Path) -> Iterator[Workers]:
    with workers(state.url, ledger.url, log_of_all) as with_environment:
        yield with_environment


@pytest.fixture
def bank(mode: Mode, with_environment: Workers, state: State, ledger: Ledger, shown: None) -> Bank:
    return Bank(with_environment(mode.environment), state, ledger)


@pytest.fixture
def undisturbed(mode: Mode, with_environment: Workers) -> Forks:
    """Executes orders for their boundaries to be seen."""
    return with_environment(mode.undisturbed)


@pytest.mark.parametrize("mode", few(ALL), ids=str)
def test_crash_at_every_boundary(bank: Bank, undisturbed: Forks, mode: Mode, stride: int) -> None:
    """Wherever a process is killed, the operation is done once: its key is free at once, or when
    its lease is over; the next retry executes what is left to do, the one after it is a replay.
    """
    ended = undisturbed.send(Order(mode.path))
    assert ended.status == 201
    bank.assert_recovers(mode, bank.boundaries(mode, ended)[::stride])


@pytest.mark.parametrize("mode", few(FAILING), ids=str)
def test_crash_while_failing(bank: Bank, undisturbed: Forks, mode: Mode, stride: int) -> None:
    """The same where the operation was about to fail: while it is rolled back, and while that is
    written down.
    """
    ended = undisturbed.send(Order(mode.path, fails=True))
    assert ended.status == 500
    bank.assert_recovers(mode, bank.boundaries(mode, ended)[::stride], fails=True)


@pytest.mark.parametrize("mode", [STEPPED], ids=str)
def test_crash_again_at_every_boundary(
    bank: Bank, undisturbed: Forks, mode: Mode, stride: int
) -> None:
    """Wherever the process that resumes an operation is killed too, the third one completes it,
    whichever recovery point the first had come to.
    """
    interruptions = _interruptions(bank, undisturbed, mode)
    crashes = [(first, strike) for first in interruptions for strike in first.resumed][::stride]
    orders = [Order(mode.path) for _ in crashes]
    for order, (first, _) in zip(orders, crashes, strict=True):
        bank.kill(order, first.strike)
    bank.state.database.wait_until_idle()
    bank.state.wait_for_end_of_leases()
    for order, (_, strike) in zip(orders, crashes, strict=True):
        bank.kill(order, strike)
        bank.assert_claim_is_bounded(mode, order)
    bank.state.database.wait_until_idle()
    bank.state.wait_for_end_of_leases()
    for order in orders:
        bank.assert_recovered(mode, order)


@dataclass(frozen=True)
class _Interruption:
    """A crash that leaves a state like no other, and where the process that resumes can crash."""

    strike: Strike
    resumed: list[Strike]


def _interruptions(bank: Bank, undisturbed: Forks, mode: Mode) -> list[_Interruption]:
    """One crash for each state that a crash can leave for somebody to resume."""
    left: dict[int, tuple[Strike, Order]] = {}
    for strike in bank.boundaries(mode, undisturbed.send(Order(mode.path))):
        order = Order(mode.path)
        bank.kill(order, strike)
        bank.state.database.wait_until_idle()
        row = bank.state.row(order)
        if row is not None and row.status == "in_progress":
            left.setdefault(row.steps, (strike, order))
    assert sorted(left) == [0, 1, 2, 3]
    bank.state.wait_for_end_of_leases()
    return [
        _Interruption(strike, bank.statements(mode, undisturbed.send(order)))
        for strike, order in left.values()
    ]
