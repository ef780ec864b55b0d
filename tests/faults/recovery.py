"""What must hold after any fault: one effect, one response, and no key that is stuck.

Asserted for many operations at a time, so that their leases end together.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from .boundaries import HEARTBEAT, MAIN, Strike, renewal
from .ledger import Ledger
from .processes import Ended, Forks, Order
from .state import State

LEASE = 1.0
"""Seconds; see the bank's settings."""
NEVER_OVER = "600"
"""Seconds that a lease lasts where the boundaries are counted: an owner that is slower than its
lease asks the store once more, and would pass some that others do not.
"""


@dataclass(frozen=True)
class Mode:
    """An operation of the bank, and what one execution of it does in the database.

    Attributes:
        path: of its view.
        effects: the kinds of the rows that it makes, in alphabetical order.
        atomic_requests: whether a transaction is around each request.
        thread: whose boundaries are of interest.
        combined: whether several statements go to the database in one message, where they can.
    """

    path: str
    effects: tuple[str, ...]
    atomic_requests: bool = False
    thread: str = MAIN
    combined: bool = True

    def __str__(self) -> str:
        name = self.path.strip("/") + ("-atomic-requests" if self.atomic_requests else "")
        return name if self.combined else f"{name}-one-by-one"

    @property
    def transactional(self) -> bool:
        """Whether its claim is gone with the process that had it."""
        return self.path in {"/transactional/", "/drf/"}

    @property
    def environment(self) -> dict[str, str]:
        """For the process that is to execute it."""
        environment = {"ATOMIC_REQUESTS": "1"} if self.atomic_requests else {}
        return environment if self.combined else {**environment, "ONE_BY_ONE": "1"}

    @property
    def undisturbed(self) -> dict[str, str]:
        """The same for one that shows what boundaries there are."""
        lease = {} if self.thread == HEARTBEAT else {"LEASE_SECONDS": NEVER_OVER}
        return self.environment | lease


CHARGE, TRANSFER = ("charge",), ("credit", "debit")
TRANSACTIONAL = Mode("/transactional/", CHARGE)
ONE_BY_ONE = Mode("/transactional/", CHARGE, combined=False)
DRF = Mode("/drf/", CHARGE)
TRANSACTIONAL_REQUEST = Mode("/transactional/", CHARGE, atomic_requests=True)
LEASED = Mode("/leased/", CHARGE)
STEPPED = Mode("/stepped/", TRANSFER)
STEPPED_ONE_BY_ONE = Mode("/stepped/", TRANSFER, combined=False)
RENEWED = Mode("/renewed/", TRANSFER, thread=HEARTBEAT)
FAILING = (
    TRANSACTIONAL,
    ONE_BY_ONE,
    DRF,
    TRANSACTIONAL_REQUEST,
    LEASED,
    STEPPED,
    STEPPED_ONE_BY_ONE,
)
ALL = (*FAILING, RENEWED)


@dataclass(frozen=True)
class Bank:
    """A process that executes orders, and all that is known of what became of them."""

    forks: Forks
    state: State
    ledger: Ledger

    def boundaries(self, mode: Mode, ended: Ended) -> list[Strike]:
        """Every boundary that an execution passed, as it can be struck at."""
        passed = ended.passed[mode.thread]
        if mode.thread == HEARTBEAT:  # it may have gone on, or not, when the operation ended
            passed = passed[: renewal(passed)]
        return [Strike(number, mode.thread) for number in range(len(passed))]

    def statements(self, mode: Mode, ended: Ended) -> list[Strike]:
        """The boundaries before a statement, and the last one.

        Nothing can happen between the one after a statement and the one before the next, but for
        a call of the ledger: before it is as before the statement.
        """
        *boundaries, last = self.boundaries(mode, ended)
        passed = ended.passed[mode.thread]
        return [at for at in boundaries if passed[at.number].startswith("before ")] + [last]

    def kill(self, order: Order, strike: Strike) -> None:
        """Execute the order in a process that is killed there."""
        assert self.forks.send(order, strike).signal == signal.SIGKILL, (order, strike)

    def assert_claim_is_bounded(self, mode: Mode, order: Order) -> None:
        """A dead owner's claim lives no longer than its lease, and none but for a lease."""
        row = self.state.row(order)
        if row is not None and row.status == "in_progress":
            assert not mode.transactional
            assert row.left is not None
            assert row.left <= LEASE

    def assert_retried_at_once(self, mode: Mode, order: Order) -> None:
        """A retry gets a response, or is told to wait as long as a dead owner's lease lasts."""
        ended = self.forks.send(order)
        allowed = {201} if mode.transactional else {201, 409}
        assert ended.status in allowed, ended
        if ended.status == 409:
            row = self.state.row(order)
            assert row is not None
            assert row.status == "in_progress"

    def assert_recovers(self, mode: Mode, points: list[Strike], *, fails: bool = False) -> None:
        """Kill a process at each of these points; the operation of each is done once."""
        assert points
        orders = [Order(mode.path) for _ in points]
        for order, strike in zip(orders, points, strict=True):
            self.kill(replace(order, fails=fails), strike)
            self.assert_claim_is_bounded(mode, order)
            self.state.database.wait_until_idle()
            self.assert_retried_at_once(mode, order)
        self.state.wait_for_end_of_leases()
        for order in orders:
            self.assert_recovered(mode, order)

    def assert_recovered(self, mode: Mode, order: Order) -> Ended:
        """The very next retry gets a response, the one after it is a replay; all was done once.

        To be called when the leases are over. Returns the response.
        """
        first, second = self.forks.send(order), self.forks.send(order)
        assert (first.status, second.status) == (201, 201), (first, second)
        assert second.replayed
        assert second.body == first.body
        assert_done_once(mode, order, self.state, self.ledger)
        return first


def assert_done_once(mode: Mode, order: Order, state: State, ledger: Ledger) -> None:
    """One database effect of each kind, and one entry in the ledger, under one key.

    An attempt calls the ledger once at most, and a leased one is known when it does.
    """
    assert state.effects(order) == mode.effects
    calls, booked = ledger.bookings(order.reference)
    assert booked == 1
    row = state.row(order)
    assert row is not None
    assert row.status == "completed"
    assert mode.transactional or calls <= row.attempt
