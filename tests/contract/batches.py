"""The contract of a store's methods for several operations: they do what those for one do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from idempotency_django.stores import Claim, Operation, Payload, Record
from idempotency_django.stores.records import Status
from idempotency_django.testing import RESPONSE, an_operation, eventually, in_threads
from idempotency_django.testing.contract import NEXT, StoreContract, as_record


def claims_in(acquired: Iterable[Claim | Record]) -> list[Claim]:
    """The claims that a store gave among others."""
    return [each for each in acquired if isinstance(each, Claim)]


class BatchesContract(StoreContract):
    """A batch of operations has the same results as each operation alone."""

    def several(self, count: int, **changes: object) -> list[Operation]:
        """Operations with keys of their own."""
        return [an_operation(**changes) for _ in range(count)]

    def claims(self, operations: Sequence[Operation]) -> list[Claim]:
        """The claims on operations that are all free."""
        claims = claims_in(self.store.acquire_many(operations))
        assert [claim.operation for claim in claims] == list(operations)
        return claims

    def test_no_batch(self) -> None:
        """An empty batch is no error."""
        assert list(self.store.acquire_many([])) == []
        assert list(self.store.complete_many([])) == []
        assert list(self.store.get_many([])) == []

    def test_replay_of_what_is_gone(self) -> None:
        """A replay of a record that was purged meanwhile is no error."""
        gone = Record(key="gone", scope="s", status=Status.COMPLETED)
        self.store.record_replay(gone, an_operation(extend_on_replay=True))

    def test_records_of_a_batch(self) -> None:
        """Several records are read in the order in which they are asked for, missing ones too."""
        operations = self.several(3)
        for operation in operations[:2]:
            self.completed(operation)
        names = [(operation.key, operation.scope) for operation in reversed(operations)]
        found = self.store.get_many(names)
        assert [record and record.key for record in found] == [None, names[1][0], names[2][0]]

    def test_batch_is_claimed_and_completed(self) -> None:
        """Each operation of a batch gets a claim of its own, and each claim its own response."""
        operations = self.several(20)
        bodies = [None, b"", bytes(range(256)), *(b"%d" % n for n in range(17))]
        payloads = [Payload(200 + n, (("X", f"{n}é"),), body) for n, body in enumerate(bodies)]
        with self.store.transaction():
            claims = self.claims(operations)
            assert len({claim.token for claim in claims}) == 20
            assert {claim.attempt for claim in claims} == {1}
            done = self.store.complete_many(list(zip(claims, payloads, strict=True)))
            assert list(done) == [True] * 20
        records = [self.record(operation) for operation in operations]
        assert [record.payload for record in records] == payloads
        assert {record.fingerprint for record in records} == {"f" * 64}
        with self.store.transaction():
            found = [as_record(each) for each in self.store.acquire_many(operations)]
        assert [record.payload for record in found] == payloads

    def test_batch_of_all_kinds(self) -> None:
        """However the attempts before it have ended, each request of a batch gets its own."""
        before = [self.ended(how) for how in NEXT]
        batch = [replace(self.next_request(claim), lease=None) for claim in before]
        new = an_operation()
        with self.store.transaction():
            *found, last = self.store.acquire_many([*batch, new])
            said = [self.described(*each) for each in zip(before, found, strict=True)]
            assert said == [same for same, _ in NEXT.values()]
            claims = claims_in([*found, last])
            assert claims[-1].operation == new
            assert all(self.store.complete_many([(claim, RESPONSE) for claim in claims]))
        assert not self.store.complete(before[1], RESPONSE)  # which was interrupted

    def test_expired_record_refuses_in_a_batch(self) -> None:
        """An expired record that refuses is returned to a batch, too."""
        operation = self.an_expired()
        eventually(lambda: self.record(operation).expired)
        with self.store.transaction():
            [found] = self.store.acquire_many([operation])
        assert as_record(found).expired

    def test_late_owner_in_a_batch(self) -> None:
        """Of several responses, those of late owners are not written; the others are."""
        mine, late = self.leased(), self.interrupted()
        successor = self.taken_over(late)
        other = Payload(500, (), b"late")
        done = self.store.complete_many([(late, other), (mine, RESPONSE), (successor, RESPONSE)])
        assert list(done) == [False, True, True]
        assert list(self.store.complete_many([(mine, other)])) == [False]
        assert (
            self.record(late.operation).payload == self.record(mine.operation).payload == RESPONSE
        )

    def test_rollback_of_a_batch(self) -> None:
        """A batch that is rolled back was never there."""
        if not self.store.supports_transactions:
            return
        operations = self.several(3)
        with suppress(InterruptedError), self.store.transaction():
            self.store.complete_many([(c, RESPONSE) for c in self.claims(operations)])
            raise InterruptedError
        assert not any(self.store.get(each.key, each.scope) for each in operations)

    def test_overlapping_batches(self) -> None:
        """Batches in opposite order race for the same keys: one owner each, and no deadlock."""
        operations = self.several(30)
        batches = [operations, operations[::-1]] * 4
        owners = in_threads([partial(self._contend, batch) for batch in batches])
        claimed = [claim.key for owner in owners for claim in owner]
        assert len(claimed) == len(set(claimed))
        rest = self._contend(operations)  # a loser has to try again
        assert sorted(claimed + [claim.key for claim in rest]) == sorted(
            operation.key for operation in operations
        )
        assert all(self.record(operation).payload == RESPONSE for operation in operations)

    def _contend(self, batch: Sequence[Operation]) -> list[Claim]:
        with self.store.transaction():
            claims = claims_in(self.store.acquire_many(batch))
            assert all(self.store.complete_many([(claim, RESPONSE) for claim in claims]))
            return claims
