"""The contract of stores as tests: run them over a store of your own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import ClassVar, TypeVar
from uuid import uuid4

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..errors import ClaimLost
from ..policy import DEFAULTS
from ..stores import Claim, Operation, Payload, Record, Status, Step, Store

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which a test stops waiting for something that should have happened."""

SECOND = timedelta(seconds=1)
MOMENT = timedelta(milliseconds=1)
RESPONSE = Payload(
    201, (("Content-Type", "text/plain"), ("Location", "/charges/1")), b"\x00\xff one"
)


def an_operation(**changes: object) -> Operation:
    """An operation with a key of its own."""
    given: dict[str, object] = {
        "key": str(uuid4()),
        "scope": "user:1|POST /charges/",
        "name": "POST /charges/",
        "fingerprint": "f" * 64,
        "ttl": timedelta(hours=1),
        "count_replays": True,
    }
    return Operation(**(given | changes))  # type: ignore[arg-type]  # checked by the dataclass


def in_threads(functions: Iterable[Callable[[], T]]) -> list[T]:
    """Call the functions at the same moment, each in its own thread; their results in order."""
    functions = list(functions)
    barrier = threading.Barrier(len(functions), timeout=PATIENCE)

    def call(function: Callable[[], T]) -> T:
        try:
            barrier.wait()
            return function()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(functions)) as threads:
        return list(threads.map(call, functions, timeout=PATIENCE * 2))


def eventually(condition: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    deadline, pause = time.monotonic() + PATIENCE, 0.001
    while not condition():
        assert time.monotonic() < deadline, "It did not happen."
        time.sleep(pause)
        pause = min(pause * 1.2, 0.02)  # to ask often would slow down what is waited for


def as_claim(acquired: Claim | Record) -> Claim:
    """The claim that a store gave."""
    assert isinstance(acquired, Claim), f"The key is not free: {acquired}"
    return acquired


def as_record(acquired: Claim | Record) -> Record:
    """The record that a store returned instead of a claim."""
    assert isinstance(acquired, Record)
    return acquired


class ContractSetting:
    """The store under test, and what a test does with it, each in a transaction of its own."""

    store: Store

    refuses_at_once: ClassVar[bool] = True
    """Whether a duplicate gets "in progress" while the owner holds on; SQLite makes it wait."""

    forgets_expired: ClassVar[bool] = False
    """Whether the store deletes expired records, so that keys restart with attempt 1."""

    def acquire(self, operation: Operation) -> Claim | Record:
        """Acquire and let go: with a store that has transactions, the claim ends with the call."""
        with self.store.transaction():
            return self.store.acquire(operation)

    def claim(self, operation: Operation) -> Claim:
        """Acquire within a transaction of the caller's."""
        return as_claim(self.store.acquire(operation))

    def completed(self, operation: Operation, payload: Payload = RESPONSE) -> Claim:
        """Execute the operation."""
        with self.store.transaction():
            claim = self.claim(operation)
            assert self.store.complete(claim, payload)
        return claim

    def failed(self, operation: Operation) -> Claim:
        """Fail to execute the operation."""
        with self.store.transaction():
            claim = self.claim(operation)
            assert self.store.fail(claim, "ValueError: no")
        return claim

    def record(self, operation: Operation) -> Record:
        """The operation's record, which exists."""
        record = self.store.get(operation.key, operation.scope)
        assert record is not None
        return record

    def expire(self, operation: Operation) -> None:
        """Wait for the end of a short time to live."""

        def is_over() -> bool:
            record = self.store.get(operation.key, operation.scope)
            if record is None:
                return self.forgets_expired
            return record.expired and not self.forgets_expired

        eventually(is_over)


class RacesContract(ContractSetting):
    """Of many contenders, one gets the claim."""

    def test_one_of_many_claims(self) -> None:
        """Of simultaneous duplicates, one claims; the others get "in progress" in the meantime."""
        self._race(an_operation())

    def test_one_of_many_takes_over_a_failed_key(self) -> None:
        """Only one contender claims a failed record again."""
        operation = an_operation()
        self.failed(operation)
        self._race(operation)

    def test_one_of_many_takes_over_an_expired_key(self) -> None:
        """Only one contender claims an expired record again."""
        operation = an_operation(ttl=timedelta(milliseconds=1))
        self.completed(operation)
        self.expire(operation)
        self._race(an_operation(key=operation.key))

    def _race(self, operation: Operation, contenders: int = 16) -> None:
        refused = threading.Semaphore(0)

        def contend() -> Status | None:
            with self.store.transaction():
                found = self.store.acquire(operation)
                if isinstance(found, Claim):
                    # The owner holds on until all others have been told.
                    for _ in range(contenders - 1 if self.refuses_at_once else 0):
                        assert refused.acquire(timeout=PATIENCE), "A duplicate had to wait."
                    assert self.store.complete(found, RESPONSE)
                    return None
            refused.release()
            return found.status

        outcomes = in_threads([contend] * contenders)
        assert outcomes.count(None) == 1
        others = Status.IN_PROGRESS if self.refuses_at_once else Status.COMPLETED
        assert outcomes.count(others) == contenders - 1
        assert self.record(operation).payload == RESPONSE


NEXT: Mapping[str, tuple[str, str]] = {
    "running": ("in_progress", "in_progress"),
    "interrupted": ("resumes", "in_progress"),
    "interrupted, and held": ("held", "held"),
    "interrupted, then failed": ("repeats", "failed"),
    "failed": ("repeats", "begins"),
    "failed, and pinned": ("repeats", "failed"),
    "failed, pinned, then failed": ("repeats", "failed"),
    "failed, pinned, expired, then failed": ("repeats", "begins"),
    "failed, and held": ("held", "held"),
    "completed": ("completed", "completed"),
    "completed, and expired": ("begins", "begins"),
}
"""The ends of an attempt, and the outcome of the next request: the same request, and a different
one.

It gets the record, by its status or as ``held``; or a claim that ``resumes`` an interrupted
attempt, ``repeats`` a failed one, or ``begins`` a record of its own.
"""


class LeasesContract(ContractSetting):
    """Claims that live as long as their lease."""

    def leased(self, lease: timedelta = SECOND * 99, **changes: object) -> Claim:
        """A claim with a lease, on an operation of its own."""
        return as_claim(self.store.acquire(an_operation(lease=lease, **changes)))

    def interrupted(self, **changes: object) -> Claim:
        """A claim whose lease is over."""
        claim = self.leased(MOMENT, **changes)
        eventually(lambda: self.record(claim.operation).interrupted)
        return claim

    def again(self, claim: Claim, **changes: object) -> Claim | Record:
        """Acquire the operation of a claim once more."""
        return self.store.acquire(replace(claim.operation, **changes))  # type: ignore[arg-type]

    def taken_over(self, late: Claim, **changes: object) -> Claim:
        """The claim of the successor of a late owner."""
        return as_claim(self.again(late, **{"lease": SECOND * 99, **changes}))

    def ended(self, how: str) -> Claim:
        """The claim of an attempt that has ended in one of the ways of ``NEXT``."""
        life = MOMENT if "expired" in how else SECOND * 99
        if how.startswith("interrupted"):
            claim = self.interrupted(hold="held" in how)
        else:
            claim = self.leased(life, ttl=life)
        if how.startswith("completed"):
            assert self.store.complete(claim, RESPONSE)
        if how.startswith("failed"):
            assert self.store.fail(claim, "no", pinned="pinned" in how, held="held" in how)
        if "expired" in how:
            self.expire(claim.operation)
        if "then failed" in how:
            claim = self.taken_over(claim, ttl=SECOND * 99)
            assert self.store.fail(claim, "before it did anything")
        return claim

    def next_request(self, claim: Claim, *, other: bool = False) -> Operation:
        """The next request for the key of a claim: the same one, or another one."""
        fingerprint = "0" * 64 if other else claim.operation.fingerprint
        return replace(claim.operation, fingerprint=fingerprint, lease=SECOND * 99, ttl=SECOND * 99)

    def described(self, before: Claim, found: Claim | Record) -> str:
        """The outcome of a request after a claim, in the words of ``NEXT``."""
        if isinstance(found, Record):
            return "held" if found.held else str(found.status)
        assert found.token != before.token
        if found.origin != before.origin:
            return "begins"
        assert found.attempt == before.attempt + 1
        return "resumes" if found.interrupted else "repeats"

    def refused(self, claim: Claim, **changes: object) -> Record:
        """The record that a store returns to a further request for the operation of a claim."""
        return as_record(self.again(claim, **changes))

    def test_lease_that_is_left(self) -> None:
        """A record in progress says when its lease ends, also after a renewal, and once it is over.

        Three renewals tell the seconds from any other unit.
        """
        claim = self.leased()
        for seconds in (3600, 60, 86400):
            assert self.store.extend(claim, seconds)
            for found in (self.record(claim.operation), self.refused(claim)):
                assert found.lease_left is not None
                assert seconds / 2 < found.lease_left < seconds + 0.1
        assert self.store.complete(claim, RESPONSE)
        assert self.record(claim.operation).lease_left is None
        assert self.record(self.interrupted().operation).lease_left == 0
        without = an_operation()
        with self.store.transaction():
            claim = self.claim(without)
            known = self.store.get(without.key, without.scope)
            assert known is None or not known.interrupted  # no store need write it before it ends
            assert self.store.fail(claim, "")
        assert self.record(without).lease_left is None

    def test_next_request(self) -> None:
        """The outcome of the next request for a key depends on the end of the previous attempt.

        All attempts at one record have the beginning of their tokens in common, by which they
        recognise the messages that earlier ones have published. A request that is refused leaves
        the key to the waiting request.
        """
        for how, (same, other) in NEXT.items():
            one, two = self.ended(how), self.ended(how)
            found = self.store.acquire(self.next_request(one))
            assert self.described(one, found) == same, how
            found = self.store.acquire(self.next_request(two, other=True))
            assert self.described(two, found) == other, how
            if isinstance(found, Record):
                assert found.fingerprint == "f" * 64
                found = self.store.acquire(self.next_request(two))
                assert self.described(two, found) == same, how

    def test_late_owner_of_a_lease_writes_nothing(self) -> None:
        """An owner that was taken over can neither complete, fail nor extend, now or later."""
        late = self.interrupted()
        claim = self.taken_over(late)
        for _ in range(2):
            self.assert_powerless(late)
            self.store.complete(claim, RESPONSE)
        assert self.record(claim.operation).payload == RESPONSE

    def assert_powerless(self, claim: Claim) -> None:
        """The owner of a claim that has ended can write nothing."""
        assert not self.store.complete(claim, Payload(500, (), b"late"))
        assert not self.store.fail(claim, "late")
        assert not self.store.extend(claim, 99)

    def test_late_owner_without_successor(self) -> None:
        """An owner that is late, but was not taken over, may still complete, or go on."""
        claim = self.interrupted()
        assert self.store.extend(claim, 99)
        assert not self.record(claim.operation).interrupted
        assert self.refused(claim).status is Status.IN_PROGRESS
        assert self.store.complete(self.interrupted(), RESPONSE)

    def test_settled_claim_cannot_be_extended(self) -> None:
        """A completed or failed record no longer has a lease, nor an owner."""
        for how in ("completed", "failed", "failed, and held"):
            claim = self.ended(how)
            before = self.record(claim.operation)
            self.assert_powerless(claim)
            assert self.record(claim.operation) == before

    def test_held_claim_is_not_taken_over(self) -> None:
        """An interrupted attempt with ``hold`` is not resumed, and its owner may complete."""
        late = self.interrupted(hold=True)
        found = self.refused(late)
        assert (found.interrupted, found.held) == (True, True)
        assert self.record(late.operation).held
        assert self.store.purge(timedelta(0), 10) == 0
        assert self.store.complete(late, RESPONSE)

    def test_last_attempt_is_held(self) -> None:
        """An attempt that fails with ``held`` has no owner, and no later request gets its key."""
        claim = self.leased(ttl=MOMENT)
        assert self.store.fail(claim, "ValueError: no", held=True)
        record = self.record(claim.operation)
        assert (record.status, record.attempt) == (Status.IN_PROGRESS, 1)
        assert (record.interrupted, record.held) == (True, True)
        assert self.store.purge(timedelta(0), 10) == 0
        assert self.record(claim.operation).held

    def test_one_of_many_leases(self) -> None:
        """Of many contenders for a new or an interrupted lease, one gets it, the others at once
        its record.
        """
        for operation in (an_operation(lease=SECOND * 99), self.interrupted().operation):
            wanted = replace(operation, lease=SECOND * 99)
            found = in_threads([partial(self.store.acquire, wanted)] * 16)
            others = [each.status for each in found if isinstance(each, Record)]
            assert others == [Status.IN_PROGRESS] * 15
            [claim] = [each for each in found if isinstance(each, Claim)]
            assert self.store.complete(claim, RESPONSE)

    def test_purge_and_leases(self) -> None:
        """A running operation is never purged; an interrupted one is, after its time to live."""
        running = self.leased(ttl=MOMENT)
        gone = self.interrupted(ttl=MOMENT)
        if not self.forgets_expired:
            eventually(lambda: self.store.purge(timedelta(0), 10) == 1)
            assert self.store.get(gone.key, gone.scope) is None
        assert self.store.purge(timedelta(0), 10) == 0
        assert self.store.complete(running, RESPONSE)


class StepsContract(LeasesContract):
    """Steps, for stores that keep them."""

    def step(self, claim: Claim, name: str) -> bool:
        """Store a step in a transaction of its own; whether it was committed."""
        step = Step(name=name, attempt=claim.attempt, result="[1, null]")
        try:
            with self.store.durable("The step"):
                return self.store.save_step(claim, step)
        except ClaimLost:
            return False

    def names(self, claim: Claim) -> list[str]:
        """The names of the stored steps, in the order in which they were stored."""
        return [step.name for step in self.store.steps(claim)]

    def test_steps_survive(self) -> None:
        """The attempts after a failure or an interruption get the stored steps, in order."""
        if not self.store.supports_steps:
            return
        first = self.leased()
        assert self.names(first) == []
        assert self.step(first, "debit")
        assert self.step(first, "card")
        self.store.fail(first, "no", pinned=True)
        second = self.taken_over(first)
        assert list(self.store.steps(second)) == [
            Step(name="debit", attempt=1, result="[1, null]"),
            Step(name="card", attempt=1, result="[1, null]"),
        ]
        assert self.step(second, "credit")
        assert self.names(second) == ["debit", "card", "credit"]

    def test_late_owner_stores_no_step(self) -> None:
        """An owner that was taken over cannot add a step."""
        if not self.store.supports_steps:
            return
        late = self.interrupted()
        claim = self.taken_over(late)
        assert not self.step(late, "late")
        assert self.names(claim) == []
        assert self.step(claim, "debit")
        assert self.store.complete(claim, RESPONSE)
        assert not self.step(claim, "too late")

    def test_steps_bind_the_request(self) -> None:
        """A failed attempt with steps is resumed by the same request only."""
        if not self.store.supports_steps:
            return
        claim = self.leased()
        self.step(claim, "debit")
        self.store.fail(claim, "no")
        found = self.refused(claim, fingerprint="0" * 64)
        assert (found.status, found.fingerprint) == (Status.FAILED, "f" * 64)
        assert self.taken_over(claim).attempt == 2

    def test_steps_end_with_their_record(self) -> None:
        """A request after the time to live is another operation, without the old steps."""
        if not self.store.supports_steps:
            return
        claim = self.leased(ttl=MOMENT)
        self.step(claim, "debit")
        assert self.store.complete(claim, RESPONSE)
        self.expire(claim.operation)
        assert self.names(self.taken_over(claim)) == []

    def test_fence(self) -> None:
        """A fenced transaction commits for the owner, but not for an owner that was taken over."""
        if not self.store.supports_transactions:
            return
        late = self.interrupted()
        with self.store.fenced(late):
            pass  # it has not been taken over yet
        self.taken_over(late)
        committed = True
        try:
            with self.store.fenced(late):
                pass
        except ClaimLost:
            committed = False
        assert not committed


class OwnersContract(ContractSetting):
    """One owner after another."""

    def test_policies_that_it_can_keep(self) -> None:
        """It takes the transactional mode only if it has transactions, and any other mode."""
        taken = []
        for mode in ("auto", "leased", "transactional"):
            with suppress(ImproperlyConfigured):
                self.store.validate(DEFAULTS.replace(mode=mode))
                taken.append(mode)
        assert taken[:2] == ["auto", "leased"]
        assert ("transactional" in taken) == self.store.supports_transactions

    def test_first_acquire_claims(self) -> None:
        """A key without a record is claimed, as attempt 1, with a token of its own."""
        one, other = an_operation(), an_operation()
        assert self.store.get(one.key, one.scope) is None  # which claims nothing
        with self.store.transaction():
            first, second = self.claim(one), self.claim(other)
            assert (first.attempt, second.attempt) == (1, 1)
            assert first.operation == one
            assert first.token != second.token
            self.store.fail(first, "")
            self.store.fail(second, "")

    def test_completed_record_is_returned(self) -> None:
        """After completion, every request gets the record with exactly its response."""
        operation = an_operation()
        self.completed(operation)
        found = as_record(self.acquire(operation))
        assert (found.status, found.payload) == (Status.COMPLETED, RESPONSE)
        assert (found.fingerprint, found.attempt, found.expired) == ("f" * 64, 1, False)
        other = self.acquire(an_operation(key=operation.key, fingerprint="0" * 64))
        assert as_record(other).fingerprint == "f" * 64

    def test_responses_survive_exactly(self) -> None:
        """Empty and binary bodies, repeated headers, and tombstones come back as they were."""
        payloads = [
            Payload(204, (), b""),
            Payload(
                200, (("Link", "<a>"), ("Link", "<b>"), ("X-Text", 'é, "q"')), bytes(range(256))
            ),
            Payload(200, (("Content-Type", "text/csv"),), None),
        ]
        for payload in payloads:
            operation = an_operation()
            self.completed(operation, payload)
            assert self.record(operation).payload == payload

    def test_key_belongs_to_its_scope(self) -> None:
        """The same key in another scope, and a key in other letters, is another operation."""
        operation = an_operation(key="Key-a", scope="user:Bob")
        self.completed(operation)
        for key, scope in [("Key-a", "user:bob"), ("key-A", "user:Bob"), ("Key-a", "user:Bob2")]:
            with self.store.transaction():
                claim = self.claim(an_operation(key=key, scope=scope))
                self.store.fail(claim, "")

    def test_failed_key_is_free(self) -> None:
        """A failed attempt leaves the key free; the next one is counted, for any request."""
        operation = an_operation()
        assert [self.failed(operation).attempt for _ in range(3)] == [1, 2, 3]
        assert self.record(operation).status is Status.FAILED
        assert self.record(operation).payload is None
        again = an_operation(key=operation.key, fingerprint="0" * 64)
        assert self.completed(again).attempt == 4
        assert self.record(operation).fingerprint == "0" * 64

    def test_expired_key_is_free(self) -> None:
        """After its time to live, a record is no longer replayed."""
        operation = an_operation(ttl=timedelta(milliseconds=1))
        self.completed(operation)
        self.expire(operation)
        again = self.completed(an_operation(key=operation.key))
        assert again.attempt == (1 if self.forgets_expired else 2)
        assert not self.record(operation).expired

    def test_time_left(self) -> None:
        """A record says what is left of its time to live; without one, it stays."""
        operation, permanent = an_operation(ttl=SECOND * 99), an_operation(ttl=None)
        for each in (operation, permanent):
            self.completed(each)
        for found in (self.record(operation), as_record(self.acquire(operation))):
            assert found.ttl_left is not None
            assert 0 < found.ttl_left < 99.1  # clocks and their arithmetic round
        for found in (self.record(permanent), as_record(self.acquire(permanent))):
            assert found.ttl_left is None
        assert not self.record(permanent).expired
        assert self.store.purge(timedelta(0), 100) == 0

    # Expired records that refuse.

    def an_expired(self, retention: timedelta = SECOND * 99) -> Operation:
        """An operation whose record has expired, and that does not execute again for that."""
        operation = an_operation(
            ttl=timedelta(milliseconds=1), refuse_expired=True, retention=retention
        )
        self.completed(operation)
        return operation

    def test_expired_record_refuses(self) -> None:
        """The expired record is returned, to the same request and to others."""
        operation = self.an_expired()
        eventually(lambda: self.record(operation).expired)
        other = replace(operation, fingerprint="0" * 64)
        for found in (self.acquire(operation), self.acquire(other)):
            expired = as_record(found)
            assert (expired.status, expired.expired) == (Status.COMPLETED, True)
            assert (expired.fingerprint, expired.counted) == (operation.fingerprint, False)
            assert -99 < (expired.ttl_left or 0) <= 0
        with self.store.transaction():
            [found] = self.store.acquire_many([operation])
        assert as_record(found).expired

    def test_operation_decides_whether_an_expired_record_refuses(self) -> None:
        """The key is free for an operation without it, even if the record was stored with it."""
        operation = self.an_expired()
        eventually(lambda: self.record(operation).expired)
        assert self.completed(replace(operation, refuse_expired=False)).attempt == 2

    def test_failed_attempt_does_not_expire(self) -> None:
        """A failed record leaves its key free for its request, and pinned, when it has expired."""
        operation = an_operation(
            ttl=timedelta(milliseconds=1), refuse_expired=True, retention=SECOND * 99
        )
        with self.store.transaction():
            claim = self.claim(operation)
            assert self.store.fail(claim, "no", pinned=True)
        eventually(lambda: self.record(operation).expired)
        other = as_record(self.acquire(replace(operation, fingerprint="0" * 64)))
        assert other.status is not Status.COMPLETED
        again = self.completed(operation)
        assert (again.attempt, again.origin) == (2, claim.origin)

    def test_expired_record_is_retained(self) -> None:
        """A purge takes the record when its retention is over, counted from a replay, too."""
        operation = self.an_expired()
        eventually(lambda: self.record(operation).expired)
        assert self.store.purge(timedelta(0), 10) == 0
        with self.store.transaction():
            self.store.record_replay(
                self.record(operation), replace(operation, extend_on_replay=True)
            )
        eventually(lambda: self.record(operation).expired)
        assert self.store.purge(timedelta(0), 10) == 0
        assert as_record(self.acquire(operation)).expired

    def test_end_of_retention(self) -> None:
        """When the record is gone, its key is free."""
        operation = self.an_expired(retention=timedelta(milliseconds=1))

        def is_gone() -> bool:
            self.store.purge(timedelta(0), 100)
            return self.store.get(operation.key, operation.scope) is None

        eventually(is_gone)
        assert self.completed(operation).attempt == 1

    def test_late_owner_writes_nothing(self) -> None:
        """An owner that lost its claim can neither complete nor fail it."""
        operation = an_operation()
        self.failed(operation)
        late = self.failed(operation)  # of a record that was there
        with self.store.transaction():
            successor = self.claim(operation)
            assert not self.store.complete(late, RESPONSE)
            assert not self.store.fail(late, "late")
            assert self.store.complete(successor, RESPONSE)
        with self.store.transaction():
            assert not self.store.fail(late, "late")
            assert not self.store.fail(successor, "a second time")
        assert self.record(operation).payload == RESPONSE

    def test_rollback_leaves_nothing(self) -> None:
        """A claim that is rolled back was never there."""
        if not self.store.supports_transactions:
            return
        operation = an_operation()
        with suppress(InterruptedError), self.store.transaction():
            self.store.complete(self.claim(operation), RESPONSE)
            raise InterruptedError
        assert self.store.get(operation.key, operation.scope) is None
        assert self.completed(operation).attempt == 1

    def test_on_commit_follows_the_transaction(self) -> None:
        """A callback for the commit is called after it, once, and never after a rollback."""
        calls: list[str] = []
        with self.store.transaction():
            self.store.on_commit(lambda: calls.append("committed"))
            assert calls == ([] if self.store.supports_transactions else ["committed"])
        with suppress(InterruptedError), self.store.transaction():
            if self.store.supports_transactions:
                self.store.on_commit(lambda: calls.append("rolled back"))
            raise InterruptedError
        assert calls == ["committed"]

    # Replays.

    def test_replay_starts_a_new_lifetime(self) -> None:
        """With ``extend_on_replay`` the time to live counts from the last use."""
        operation = an_operation(ttl=timedelta(milliseconds=1))
        self.completed(operation)
        self.expire(operation)
        longer = an_operation(key=operation.key, ttl=timedelta(hours=1), extend_on_replay=True)
        with self.store.transaction():
            self.store.record_replay(self.record(operation), longer)
        kept = self.record(operation)
        assert kept.payload == RESPONSE
        if self.store.supports_transactions:  # the memory store keeps the time to live it knows
            assert not kept.expired

    def test_simultaneous_replays(self) -> None:
        """Simultaneous replays neither wait for one another nor are refused."""
        operation = an_operation()
        self.completed(operation)

        def replay() -> Payload | None:
            with self.store.transaction():
                found = as_record(self.store.acquire(operation))
                if not found.counted:
                    self.store.record_replay(found, operation)
            return found.payload

        assert in_threads([replay] * 16) == [RESPONSE] * 16

    # The end of a record.

    def test_purge_takes_the_oldest(self) -> None:
        """Purge deletes expired records, the oldest first, up to its limit."""
        first, second = (an_operation(ttl=timedelta(milliseconds=1)) for _ in range(2))
        alive, kept = (
            an_operation(),
            an_operation(ttl=timedelta(milliseconds=1), retention=SECOND * 99),
        )
        for operation in (first, second, alive, kept):
            self.completed(operation)
            if operation is not alive:
                self.expire(operation)
        if self.forgets_expired:
            assert self.store.purge(timedelta(0), 10) == 0
            return
        assert self.store.purge(SECOND * 99, 10) == 0
        assert self.store.purge(timedelta(0), 1) == 1
        assert self.store.get(first.key, first.scope) is None
        assert self.store.purge(timedelta(0), 10) == 1
        assert self.store.purge(timedelta(0), 10) == 0
        for operation in (alive, kept):
            assert self.record(operation).payload == RESPONSE

    def test_purge_spares_what_is_in_progress(self) -> None:
        """A record in progress is not purged, however old it is."""
        operation = an_operation(ttl=timedelta(milliseconds=1))
        with self.store.transaction():
            claim = self.claim(operation)
            assert self.store.purge(timedelta(0), 10) == 0
            assert self.store.complete(claim, RESPONSE)


class StoreContract(OwnersContract, StepsContract, RacesContract):
    """Subclass it and set ``self.store`` before each test.

    It asks for one operation at a time. A store with methods of its own for several, such as
    ``acquire_many()``, tests these, too.
    """
