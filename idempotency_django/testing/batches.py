"""Batches: several operations that are claimed, and completed, together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from ..records import Claim, Operation, Payload, Record, Status
from .steps import StepsContract
from .support import ANSWER, MOMENT, SECOND, an_operation, in_threads, in_words


class BatchesContract(StepsContract):
    """What is done to many operations at once is what would be done to each of them alone."""

    def several(self, count: int, **changes: object) -> list[Operation]:
        """Operations with keys of their own."""
        return [an_operation(**changes) for _ in range(count)]

    def around(self, operations: Sequence[Operation]) -> AbstractContextManager[None]:
        """The transaction that claims without a lease need."""
        return nullcontext() if operations[0].lease else self.store.transaction()

    def claims(self, operations: Sequence[Operation]) -> list[Claim]:
        """The claims on operations that are all free."""
        found = self.store.acquire_many(operations)
        claims = [claim for claim in found if isinstance(claim, Claim)]
        assert [claim.operation for claim in claims] == list(operations)
        return claims

    def test_no_batch(self) -> None:
        """An empty batch is no error."""
        assert list(self.store.acquire_many([])) == []
        assert list(self.store.complete_many([])) == []
        assert list(self.store.get_many([])) == []

    def test_records_of_a_batch(self) -> None:
        """Several records are read in the order in which they are asked for, missing ones too."""
        operations = self.several(3, lease=SECOND * 99)
        self.claims(operations[:2])
        names = [(operation.key, operation.scope) for operation in reversed(operations)]
        found = self.store.get_many(names)
        assert [record and record.key for record in found] == [None, names[1][0], names[2][0]]

    def test_batch_is_claimed_and_completed(self) -> None:
        """Each operation of a batch gets a claim of its own, and each claim its own answer."""
        for lease in (None, SECOND * 99):
            operations = self.several(20, lease=lease)
            bodies = [None, b"", bytes(range(256)), *(b"%d" % n for n in range(17))]
            answers = [Payload(200 + n, (("X", f"{n}é"),), body) for n, body in enumerate(bodies)]
            with self.around(operations):
                claims = self.claims(operations)
                assert len({claim.token for claim in claims}) == 20
                assert {claim.attempt for claim in claims} == {1}
                done = self.store.complete_many(list(zip(claims, answers, strict=True)))
                assert list(done) == [True] * 20
            records = [self.record(operation) for operation in operations]
            assert [record.payload for record in records] == answers
            assert {record.fingerprint for record in records} == {"f" * 64}
            found = self.acquired_many(operations)
            assert [one.payload for one in found if isinstance(one, Record)] == answers

    def acquired_many(self, operations: Sequence[Operation]) -> Sequence[Claim | Record]:
        """Acquire a batch and let go."""
        with self.around(operations):
            return self.store.acquire_many(operations)

    def test_batch_of_all_kinds(self) -> None:
        """New, failed, interrupted, expired, running, completed and held: each as it is alone."""
        new, running = self.several(2, lease=SECOND * 99)
        late, held = self.interrupted(), self.interrupted(hold=True)
        failed, done, old = self.leased(), self.leased(), self.leased(ttl=MOMENT)
        assert isinstance(self.store.acquire(running), Claim)
        assert self.store.fail(failed, "no")
        assert self.store.complete(done, ANSWER)
        assert self.store.complete(old, ANSWER)
        self.expire(old.operation)
        asked = [c.operation for c in (late, held, failed, done, old)]
        again = [replace(one, lease=SECOND * 99, ttl=SECOND * 99) for one in asked]
        found = self.store.acquire_many([again[0], running, *again[1:], new])
        attempts = [one.attempt if isinstance(one, Claim) else one.status for one in found]
        progress, expired = Status.IN_PROGRESS, 1 if self.forgets_expired else 2
        assert attempts == [2, progress, progress, 2, Status.COMPLETED, expired, 1]
        assert isinstance(found[2], Record)
        assert found[2].held
        assert isinstance(found[4], Record)
        assert found[4].payload == ANSWER
        claims = [one for one in found if isinstance(one, Claim)]
        assert claims[0].interrupted
        assert all(self.store.complete_many([(claim, ANSWER) for claim in claims]))
        assert not self.store.complete(late, ANSWER)

    def test_same_operation_twice_in_a_batch(self) -> None:
        """An operation that is there twice is claimed once, and replayed each time."""
        for lease in (None, SECOND * 99):
            one, other = self.several(2, lease=lease)
            twin = replace(one, fingerprint="0" * 64)
            batch = [one, other, one, twin]
            with self.around(batch):
                found = self.store.acquire_many(batch)
                kinds = [isinstance(each, Claim) for each in found]
                assert kinds == [True, True, False, False]
                assert in_words(found[2]) == in_words(found[3]) == "in progress"
                claims = [each for each in found if isinstance(each, Claim)]
                assert all(self.store.complete_many([(claim, ANSWER) for claim in claims]))
            replays = [each for each in self.acquired_many(batch) if isinstance(each, Record)]
            assert [each.payload for each in replays] == [ANSWER] * 4

    def test_late_owner_in_a_batch(self) -> None:
        """Of several answers, those of late owners are not written; the others are."""
        mine, late = self.leased(), self.interrupted()
        successor = self.taken_over(late)
        other = Payload(500, (), b"late")
        done = self.store.complete_many([(late, other), (mine, ANSWER), (successor, ANSWER)])
        assert list(done) == [False, True, True]
        assert list(self.store.complete_many([(mine, other)])) == [False]
        assert self.record(late.operation).payload == self.record(mine.operation).payload == ANSWER

    def test_rollback_of_a_batch(self) -> None:
        """A batch that is rolled back was never there."""
        if not self.store.supports_transactions:
            return
        operations = self.several(3)
        try:
            with self.store.transaction():
                self.store.complete_many([(c, ANSWER) for c in self.claims(operations)])
                raise InterruptedError
        except InterruptedError:
            pass
        assert not any(self.store.get(each.key, each.scope) for each in operations)

    def test_overlapping_batches(self) -> None:
        """Batches in opposite order race for the same keys: one owner each, and no deadlock."""
        for lease in (None, SECOND * 99):
            operations = self.several(30, lease=lease)
            batches = [operations, operations[::-1]] * 4
            owners = in_threads([partial(self._contend, batch) for batch in batches])
            claimed = [claim.key for owner in owners for claim in owner]
            assert len(claimed) == len(set(claimed))
            rest = self._contend(operations)  # where somebody has to try again
            assert sorted(claimed + [claim.key for claim in rest]) == sorted(
                operation.key for operation in operations
            )
            assert all(self.record(operation).payload == ANSWER for operation in operations)

    def _contend(self, batch: Sequence[Operation]) -> list[Claim]:
        with self.around(batch):
            found = self.store.acquire_many(batch)
            claims = [claim for claim in found if isinstance(claim, Claim)]
            assert all(self.store.complete_many([(claim, ANSWER) for claim in claims]))
            return claims
