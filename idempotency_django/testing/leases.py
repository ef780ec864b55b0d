"""Leases: claims that are made outside any transaction and visible to all."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from ..records import Claim, Payload, Record, Status
from .setting import ContractSetting
from .support import ANSWER, MOMENT, SECOND, an_operation, eventually, in_threads, in_words


class LeasesContract(ContractSetting):
    """Claims that live as long as their lease."""

    def leased(self, lease: timedelta = SECOND * 99, **changes: object) -> Claim:
        """A claim with a lease, on an operation of its own."""
        claim = self.store.acquire(an_operation(lease=lease, **changes))
        assert isinstance(claim, Claim)
        return claim

    def interrupted(self, **changes: object) -> Claim:
        """A claim whose lease is over."""
        claim = self.leased(MOMENT, **changes)
        eventually(lambda: self.record(claim.operation).interrupted)
        return claim

    def again(self, claim: Claim, **changes: object) -> Claim | Record:
        """Acquire the operation of a claim once more."""
        return self.store.acquire(replace(claim.operation, **changes))  # type: ignore[arg-type]

    def taken_over(self, late: Claim) -> Claim:
        """The claim of the successor of a late owner."""
        claim = self.again(late, lease=SECOND * 99)
        assert isinstance(claim, Claim)
        return claim

    def test_lease_is_seen(self) -> None:
        """While its lease lasts, a claim is in progress for everybody else, whatever they ask."""
        claim = self.leased()
        record = self.record(claim.operation)
        assert (record.status, record.attempt) == (Status.IN_PROGRESS, 1)
        assert (record.fingerprint, record.interrupted, record.held) == ("f" * 64, False, False)
        assert record.lease_left is not None
        assert 0 < record.lease_left < 99.1  # clocks and their arithmetic round
        [found, other] = in_threads(
            [lambda: self.again(claim), lambda: self.again(claim, fingerprint="0" * 64)]
        )
        assert in_words(found) == in_words(other) == "in progress"
        assert isinstance(found, Record)
        assert 0 < (found.lease_left or 0) < record.lease_left + 0.1
        assert self.store.complete(claim, ANSWER)
        completed = self.record(claim.operation)
        assert (completed.payload, completed.lease_left) == (ANSWER, None)

    def test_lease_that_is_left(self) -> None:
        """A record in progress says when its lease ends, also after a renewal, and once it is over.

        Three renewals tell the seconds from any other unit.
        """
        claim = self.leased()
        for seconds in (3600, 60, 86400):
            assert self.store.extend(claim, seconds)
            left = self.record(claim.operation).lease_left
            assert left is not None
            assert seconds / 2 < left < seconds + 0.1
        assert self.record(self.interrupted().operation).lease_left == 0
        without = an_operation()
        with self.store.transaction():
            claim = self.claim(without)
            assert self.record(without).lease_left is None
            self.store.fail(claim, "")

    def test_lease_ends(self) -> None:
        """After its lease a claim is taken over, as the next attempt and with another token."""
        late = self.interrupted()
        claim = self.taken_over(late)
        assert (claim.attempt, claim.token == late.token) == (2, False)
        assert not self.record(claim.operation).interrupted
        assert self.store.complete(claim, ANSWER)
        assert self.record(claim.operation).attempt == 2

    def test_attempts_at_one_record_have_one_origin(self) -> None:
        """However an attempt ended, the next one at the same record has the beginning of its token.

        By that beginning, an attempt recognises the messages that an earlier one has published.
        """
        late = self.interrupted()
        second = self.taken_over(late)
        assert self.store.fail(second, "no", pinned=True)
        third = self.taken_over(second)
        assert late.origin == second.origin == third.origin
        assert len({late.token, second.token, third.token}) == 3

    def test_records_have_origins_of_their_own(self) -> None:
        """An expired record, or one of another request, leaves its origin to nobody."""
        expired, failed = self.leased(ttl=MOMENT), self.leased()
        assert self.store.complete(expired, ANSWER)
        assert self.store.fail(failed, "no")
        self.expire(expired.operation)
        again = self.again(expired, ttl=SECOND * 99, lease=SECOND * 99)
        other = self.again(failed, fingerprint="0" * 64)
        assert isinstance(again, Claim)
        assert isinstance(other, Claim)
        assert len({each.origin for each in (expired, failed, again, other)}) == 4

    def test_late_owner_of_a_lease_writes_nothing(self) -> None:
        """An owner that was taken over can neither complete, fail nor extend, now or later."""
        late = self.interrupted()
        claim = self.taken_over(late)
        other = Payload(500, (), b"late")
        for _ in range(2):
            assert not self.store.complete(late, other)
            assert not self.store.fail(late, "late")
            assert not self.store.extend(late, 99)
            self.store.complete(claim, ANSWER)
        assert self.record(claim.operation).payload == ANSWER

    def test_late_owner_without_successor(self) -> None:
        """An owner that is late, but was not taken over, may still complete, or go on."""
        claim = self.interrupted()
        assert self.store.extend(claim, 99)
        assert not self.record(claim.operation).interrupted
        assert in_words(self.again(claim)) == "in progress"
        assert self.store.complete(self.interrupted(), ANSWER)

    def test_settled_claim_cannot_be_extended(self) -> None:
        """A completed or failed record no longer has a lease."""
        claim, failed = self.leased(), self.leased()
        assert self.store.complete(claim, ANSWER)
        assert self.store.fail(failed, "no")
        assert not self.store.extend(claim, 99)
        assert not self.store.extend(failed, 99)
        assert not self.store.complete(claim, Payload(200, (), b"another"))
        assert self.record(claim.operation).payload == ANSWER

    def test_many_leases_are_extended_together(self) -> None:
        """Each of several claims is extended, or refused, as it would be alone."""
        mine, late, done = self.interrupted(), self.interrupted(), self.leased()
        self.taken_over(late)
        assert self.store.complete(done, ANSWER)
        assert list(self.store.extend_many([late, mine, done], 99)) == [False, True, False]
        assert not self.record(mine.operation).interrupted
        assert self.record(done.operation).payload == ANSWER
        several = [self.interrupted() for _ in range(20)]
        assert list(self.store.extend_many(several, 99)) == [True] * 20
        assert all(in_words(self.again(claim)) == "in progress" for claim in several)
        assert list(self.store.extend_many([mine], 0.001)) == [True]
        eventually(lambda: self.record(mine.operation).interrupted)

    def test_failed_lease_is_free(self) -> None:
        """A claim that its owner has failed is free at once, before its lease is over."""
        claim = self.leased()
        assert self.store.fail(claim, "ValueError: no")
        assert self.record(claim.operation).status is Status.FAILED
        assert self.taken_over(claim).attempt == 2

    def test_pinned_key_is_kept_for_its_request(self) -> None:
        """A failed attempt that is pinned frees its key for the same request only, for its life."""
        first = self.leased()
        assert self.store.fail(first, "no", pinned=True)
        found = self.again(first, fingerprint="0" * 64)
        assert isinstance(found, Record)
        assert (found.status, found.fingerprint) == (Status.FAILED, "f" * 64)
        second = self.taken_over(first)
        assert self.store.fail(second, "before it did anything")  # the first one did
        assert isinstance(self.again(first, fingerprint="0" * 64), Record)
        assert self.taken_over(first).attempt == 3

    def test_key_without_a_pin(self) -> None:
        """A failed attempt that is not pinned frees its key for any request, which starts over."""
        first = self.leased()
        assert self.store.fail(first, "no")
        second = self.again(first, fingerprint="0" * 64)
        assert isinstance(second, Claim)
        assert self.store.fail(second, "no", pinned=True)
        assert isinstance(self.again(first), Record)

    def test_pin_ends_with_its_record(self) -> None:
        """A request after the time to live may ask for anything, and is not pinned."""
        first = self.leased(MOMENT, ttl=MOMENT)
        assert self.store.fail(first, "no", pinned=True)
        self.expire(first.operation)
        second = self.again(first, fingerprint="0" * 64, ttl=SECOND * 99, lease=SECOND * 99)
        assert isinstance(second, Claim)
        assert self.store.fail(second, "no")
        assert isinstance(self.again(first), Claim)

    def test_interruption_pins(self) -> None:
        """Nobody knows what an interrupted attempt has done: its key is its request's from then."""
        claim = self.taken_over(self.interrupted())
        assert self.store.fail(claim, "before it did anything")
        assert isinstance(self.again(claim, fingerprint="0" * 64), Record)
        assert self.taken_over(claim).attempt == 3

    def test_another_request_resumes_nothing(self) -> None:
        """An interrupted attempt is not resumed by a request that asks for something else."""
        late = self.interrupted()
        found = self.again(late, fingerprint="0" * 64)
        assert isinstance(found, Record)
        assert (found.status, found.fingerprint) == (Status.IN_PROGRESS, "f" * 64)
        assert self.taken_over(late).attempt == 2

    def test_held_claim_is_not_taken_over(self) -> None:
        """An interrupted attempt with ``hold`` is not resumed, and its owner may complete."""
        late = self.interrupted(hold=True)
        found = self.again(late)
        assert isinstance(found, Record)
        assert (found.interrupted, found.held) == (True, True)
        assert self.record(late.operation).held
        assert self.store.purge(timedelta(0), 10) == 0
        assert self.store.complete(late, ANSWER)

    def test_last_attempt_is_held(self) -> None:
        """What fails with ``held`` has no owner, and no request gets its key, however late."""
        claim = self.leased(ttl=MOMENT)
        assert self.store.fail(claim, "ValueError: no", held=True)
        assert not self.store.complete(claim, ANSWER)
        assert not self.store.fail(claim, "late")
        assert not self.store.extend(claim, 99)
        record = self.record(claim.operation)
        assert (record.status, record.attempt) == (Status.IN_PROGRESS, 1)
        assert (record.interrupted, record.held) == (True, True)
        assert isinstance(self.again(claim), Record)
        assert isinstance(self.again(claim, fingerprint="0" * 64), Record)
        assert self.store.purge(timedelta(0), 10) == 0
        assert self.record(claim.operation).held

    def test_attempt_after_an_interruption(self) -> None:
        """A claim says whether the attempt before it was interrupted, and not ended."""
        first = self.leased()
        assert not first.interrupted
        assert self.store.fail(first, "no")
        assert not self.taken_over(first).interrupted
        late = self.interrupted()
        assert self.taken_over(late).interrupted

    def test_one_of_many_takes_over_a_lease(self) -> None:
        """Of many contenders for an interrupted claim, one gets it, the others get its record."""
        late = self.interrupted()
        found = in_threads([lambda: self.again(late, lease=SECOND * 99)] * 16)
        [claim] = [one for one in found if isinstance(one, Claim)]
        assert claim.attempt == 2
        assert {in_words(one) for one in found if one is not claim} == {"in progress"}
        assert self.store.complete(claim, ANSWER)

    def test_one_of_many_leases(self) -> None:
        """Of simultaneous duplicates, one gets the lease; the others get its record at once."""
        operation = an_operation(lease=SECOND * 99)
        found = in_threads([lambda: self.store.acquire(operation)] * 16)
        assert sum(isinstance(one, Claim) for one in found) == 1
        assert {in_words(one) for one in found if isinstance(one, Record)} == {"in progress"}

    def test_expired_key_is_free_for_a_lease(self) -> None:
        """After its time to live, any request can claim a record's key."""
        operation = an_operation(ttl=MOMENT)
        self.completed(operation)
        self.expire(operation)
        claim = self.store.acquire(replace(operation, lease=SECOND * 99, fingerprint="0" * 64))
        assert isinstance(claim, Claim)
        assert claim.attempt == (1 if self.forgets_expired else 2)

    def test_purge_and_leases(self) -> None:
        """A running operation is never purged; an interrupted one is, after its time to live."""
        running = self.leased(ttl=MOMENT)
        gone = self.interrupted(ttl=MOMENT)
        if not self.forgets_expired:
            eventually(lambda: self.store.purge(timedelta(0), 10) == 1)
            assert self.store.get(gone.key, gone.scope) is None
        assert self.store.purge(timedelta(0), 10) == 0
        assert self.store.complete(running, ANSWER)
