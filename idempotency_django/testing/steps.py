"""Recovery points, and the fence that protects them."""

from __future__ import annotations

from ..errors import ClaimLost
from ..records import Claim, Record, Status, Step
from .leases import LeasesContract
from .support import ANSWER, MOMENT


class StepsContract(LeasesContract):
    """Steps, for stores that keep them."""

    def step(self, claim: Claim, position: int, name: str, *, failure: str = "") -> bool:
        """Store a step in a transaction of its own; whether it was committed."""
        result = "" if failure else "[1, null]"
        step = Step(
            position=position, name=name, attempt=claim.attempt, result=result, failure=failure
        )
        try:
            with self.store.durable("The step"):
                return self.store.save_step(claim, step)
        except ClaimLost:
            return False

    def names(self, claim: Claim) -> list[str]:
        """The names of the stored steps, in order."""
        return [step.name for step in self.store.steps(claim)]

    def test_steps_survive(self) -> None:
        """The attempts after a failure or an interruption get the stored steps, in order."""
        if not self.store.supports_steps:
            return
        first = self.leased()
        assert self.names(first) == []
        assert self.step(first, 0, "debit")
        assert self.step(first, 1, "ledger")
        self.store.fail(first, "no")
        second = self.taken_over(first)
        assert list(self.store.steps(second)) == [
            Step(position=0, name="debit", attempt=1, result="[1, null]"),
            Step(position=1, name="ledger", attempt=1, result="[1, null]"),
        ]
        assert self.step(second, 2, "credit")
        assert self.names(second) == ["debit", "ledger", "credit"]

    def test_late_owner_stores_no_step(self) -> None:
        """An owner that was taken over cannot add a step."""
        if not self.store.supports_steps:
            return
        late = self.interrupted()
        claim = self.taken_over(late)
        assert not self.step(late, 0, "late")
        assert self.names(claim) == []
        assert self.step(claim, 0, "debit")
        assert self.store.complete(claim, ANSWER)
        assert not self.step(claim, 1, "too late")

    def test_steps_bind_the_request(self) -> None:
        """A failed attempt with steps is resumed by the same request only."""
        if not self.store.supports_steps:
            return
        claim = self.leased()
        self.step(claim, 0, "debit")
        self.store.fail(claim, "no")
        found = self.again(claim, fingerprint="0" * 64)
        assert isinstance(found, Record)
        assert (found.status, found.fingerprint) == (Status.FAILED, "f" * 64)
        assert self.taken_over(claim).attempt == 2

    def test_failed_steps_are_kept(self) -> None:
        """A failed step is kept with its failure, next to the steps that returned a result."""
        if not self.store.supports_steps:
            return
        first = self.leased()
        assert self.step(first, 0, "card", failure='{"text": "no funds"}')
        assert self.step(first, 1, "transfer")
        self.store.fail(first, "no", pinned=True)
        steps = self.store.steps(self.taken_over(first))
        found = [(step.name, step.result, step.failure) for step in steps]
        assert found == [("card", "", '{"text": "no funds"}'), ("transfer", "[1, null]", "")]

    def test_steps_end_with_their_record(self) -> None:
        """A request after the time to live is another operation, without the old steps."""
        if not self.store.supports_steps:
            return
        claim = self.leased(ttl=MOMENT)
        self.step(claim, 0, "debit")
        assert self.store.complete(claim, ANSWER)
        self.expire(claim.operation)
        assert self.names(self.taken_over(claim)) == []

    def test_fence(self) -> None:
        """A fenced transaction commits for the owner, but not for an owner that was taken over."""
        if not self.store.supports_transactions:
            return
        late = self.interrupted()
        with self.store.fenced(late):
            pass  # nobody has taken it over yet
        self.taken_over(late)
        committed = True
        try:
            with self.store.fenced(late):
                pass
        except ClaimLost:
            committed = False
        assert not committed
