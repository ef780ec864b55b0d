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


class StoreContract:
    """Subclass it and set ``self.store`` before each test.

    It asks for one operation at a time. A store with methods of its own for several, such as
    ``acquire_many()``, tests these, too.
    """

    store: Store

    refuses_at_once: ClassVar[bool] = True
    """Whether a duplicate gets "in progress" while the owner holds on; SQLite makes it wait."""

    forgets_expired: ClassVar[bool] = False
    """Whether the store deletes expired records, so that keys restart with attempt 1."""

    # What a test does with the store. Without a lease, each call is a transaction of its own.

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

    def failed(self, operation: Operation, *, pinned: bool = False) -> Claim:
        """Fail to execute the operation."""
        with self.store.transaction():
            claim = self.claim(operation)
            assert self.store.fail(claim, "ValueError: no", pinned=pinned)
        return claim

    def record(self, operation: Operation) -> Record:
        """The operation's record, which exists."""
        record = self.store.get(operation.key, operation.scope)
        assert record is not None
        return record

    def expire(self, operation: Operation) -> None:
        """Wait for the end of a short time to live."""

        if self.forgets_expired:
            eventually(lambda: self.store.get(operation.key, operation.scope) is None)
        else:
            eventually(lambda: self.record(operation).expired)

    def leased(self, lease: timedelta = SECOND * 99, **changes: object) -> Claim:
        """A claim with a lease, on an operation of its own."""
        return self.claim(an_operation(lease=lease, **changes))

    def interrupted(self, **changes: object) -> Claim:
        """A claim whose lease is over."""
        claim = self.leased(MOMENT, **changes)
        eventually(lambda: self.record(claim.operation).interrupted)
        return claim

    def taken_over(self, late: Claim, **changes: object) -> Claim:
        """The claim of the successor of a late owner."""
        return self.claim(replace(late.operation, **{"lease": SECOND * 99, **changes}))  # type: ignore[arg-type]

    def refused(self, claim: Claim, **changes: object) -> Record:
        """The record that a store returns to a further request for the operation of a claim."""
        return as_record(self.store.acquire(replace(claim.operation, **changes)))  # type: ignore[arg-type]

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

    def assert_powerless(self, claim: Claim) -> None:
        """The owner of a claim that has ended can write nothing."""
        before = self.record(claim.operation)
        assert not self.store.complete(claim, Payload(500, (), b"late"))
        assert not self.store.fail(claim, "late")
        assert not self.store.extend(claim, 99)
        assert self.record(claim.operation) == before

    # One claims.

    def test_policies_that_it_can_keep(self) -> None:
        """It takes the transactional mode only if it has transactions, and any other mode."""
        for mode in ("auto", "leased"):
            self.store.validate(DEFAULTS.replace(mode=mode))
        takes_transactional = True
        try:
            self.store.validate(DEFAULTS.replace(mode="transactional"))
        except ImproperlyConfigured:
            takes_transactional = False
        assert takes_transactional == self.store.supports_transactions

    def test_key_belongs_to_its_scope(self) -> None:
        """The same key in another scope, and a key in other letters, is another operation."""
        self.completed(an_operation(key="Key-a", scope="user:Bob"))
        for key, scope in [("Key-a", "user:bob"), ("key-A", "user:Bob"), ("Key-a", "user:Bob2")]:
            self.failed(an_operation(key=key, scope=scope))

    def test_one_of_many_claims(self) -> None:
        """Of simultaneous requests for a new, failed or expired key, one claims.

        The others get "in progress" in the meantime.
        """
        failed, expired = an_operation(), an_operation(ttl=MOMENT)
        self.failed(failed)
        self.completed(expired)
        self.expire(expired)
        for operation in (an_operation(), failed, replace(expired, ttl=SECOND * 99)):
            self._race(operation)

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

    # The next request.

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

    def test_responses_survive_exactly(self) -> None:
        """Empty and binary bodies, repeated headers, and tombstones come back as they were."""
        headers = (("Link", "<a>"), ("Link", "<b>"), ("X-Text", 'é, "q"'))
        tombstone = Payload(200, (("Content-Type", "text/csv"),), None)
        for payload in (Payload(204, (), b""), Payload(200, headers, bytes(range(256))), tombstone):
            operation = an_operation()
            self.completed(operation, payload)
            assert self.record(operation).payload == payload

    def test_time_left(self) -> None:
        """A record says what is left of its time to live; without one, it stays."""
        operation, permanent = an_operation(ttl=SECOND * 99), an_operation(ttl=None)
        for each in (operation, permanent):
            self.completed(each)
        for found in (self.record(operation), as_record(self.acquire(operation))):
            assert 0 < (found.ttl_left or 0) < 99.1  # clocks and their arithmetic round
        for found in (self.record(permanent), as_record(self.acquire(permanent))):
            assert (found.ttl_left, found.expired) == (None, False)
        assert self.store.purge(timedelta(0), 100) == 0

    # Expired records that refuse.

    def an_expired(self, retention: timedelta = SECOND * 99) -> Operation:
        """An operation whose record has expired, and that does not execute again for that."""
        operation = an_operation(ttl=MOMENT, refuse_expired=True, retention=retention)
        self.completed(operation)
        return operation

    def test_expired_record_refuses(self) -> None:
        """The expired record is returned, to any request that asks for that."""
        operation = self.an_expired()
        eventually(lambda: self.record(operation).expired)
        assert self.store.purge(timedelta(0), 10) == 0
        for fingerprint in ("f" * 64, "0" * 64):
            found = as_record(self.acquire(replace(operation, fingerprint=fingerprint)))
            assert (found.status, found.expired) == (Status.COMPLETED, True)
            assert (found.fingerprint, found.counted) == ("f" * 64, False)
            assert -99 < (found.ttl_left or 0) <= 0
        assert self.completed(replace(operation, refuse_expired=False)).attempt == 2

    def test_failed_attempt_does_not_expire(self) -> None:
        """A failed record leaves its key free for its request, and pinned, when it has expired."""
        operation = an_operation(ttl=MOMENT, refuse_expired=True, retention=SECOND * 99)
        claim = self.failed(operation, pinned=True)
        eventually(lambda: self.record(operation).expired)
        other = as_record(self.acquire(replace(operation, fingerprint="0" * 64)))
        assert other.status is not Status.COMPLETED
        again = self.completed(operation)
        assert (again.attempt, again.origin) == (2, claim.origin)

    def test_end_of_retention(self) -> None:
        """When the record is gone, its key is free."""
        operation = self.an_expired(retention=MOMENT)

        eventually(
            lambda: (
                self.store.purge(timedelta(0), 100)
                or self.store.get(operation.key, operation.scope) is None
            )
        )
        assert self.completed(operation).attempt == 1

    # Late owners.

    def test_lease_that_is_left(self) -> None:
        """A record in progress says when its lease ends, also after a renewal, and once it is over.

        Three renewals tell the seconds from any other unit.
        """
        claim = self.leased()
        for seconds in (3600, 60, 86400):
            assert self.store.extend(claim, seconds)
            for found in (self.record(claim.operation), self.refused(claim)):
                assert seconds / 2 < (found.lease_left or 0) < seconds + 0.1
        assert self.store.complete(claim, RESPONSE)
        assert self.record(claim.operation).lease_left is None
        assert self.record(self.interrupted().operation).lease_left == 0

    def test_late_owner_writes_nothing(self) -> None:
        """An owner whose claim is settled or taken over can neither complete, fail nor extend."""
        for how in ("completed", "failed", "failed, and held"):
            self.assert_powerless(self.ended(how))
        for how in ("interrupted", "failed"):
            late = self.ended(how)
            successor = self.taken_over(late)
            self.assert_powerless(late)
            assert self.store.complete(successor, RESPONSE)
            self.assert_powerless(late)
        assert self.record(successor.operation).payload == RESPONSE

    def test_late_owner_of_a_transaction_writes_nothing(self) -> None:
        """So can one without a lease, when a later attempt has the key."""
        operation = an_operation()
        self.failed(operation)
        late = self.failed(operation)  # of a record that was there
        with self.store.transaction():
            successor = self.claim(operation)
            assert not self.store.complete(late, RESPONSE)
            assert not self.store.fail(late, "late")
            assert self.store.complete(successor, RESPONSE)
        with self.store.transaction():
            assert not self.store.fail(successor, "a second time")
        assert self.record(operation).payload == RESPONSE

    def test_late_owner_without_successor(self) -> None:
        """An owner that is late, but was not taken over, may still complete, or go on."""
        claim = self.interrupted()
        assert self.store.extend(claim, 99)
        assert self.refused(claim).status is Status.IN_PROGRESS
        assert not self.record(claim.operation).interrupted
        assert self.store.complete(self.interrupted(), RESPONSE)

    def test_held_claim_is_not_taken_over(self) -> None:
        """An interrupted or failed attempt that is held has no successor.

        The owner of an interrupted one may complete.
        """
        late, last = self.interrupted(hold=True), self.leased(ttl=MOMENT)
        assert self.store.fail(last, "ValueError: no", held=True)
        for claim in (late, last):
            found = self.refused(claim)
            assert (found.status, found.attempt) == (Status.IN_PROGRESS, 1)
            assert (found.interrupted, found.held) == (True, True)
        assert self.store.purge(timedelta(0), 10) == 0
        assert self.record(last.operation).held
        assert self.store.complete(late, RESPONSE)

    def test_fence(self) -> None:
        """A fenced transaction commits for the owner, but not for an owner that was taken over."""
        if not self.store.supports_transactions:
            return
        late = self.interrupted()
        with self.store.fenced(late):
            pass  # it has not been taken over yet
        self.taken_over(late)
        with suppress(ClaimLost):
            with self.store.fenced(late):
                pass
            raise AssertionError("An owner that was taken over has committed.")

    # Steps, for stores that keep them.

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

    # Transactions and replays.

    def test_transaction(self) -> None:
        """A callback for the commit is called after it; a rollback leaves no claim and calls none.

        A store without transactions calls it at once.
        """
        operation, calls = an_operation(), list[str]()
        with self.store.transaction():
            self.store.on_commit(lambda: calls.append("committed"))
            assert calls == ([] if self.store.supports_transactions else ["committed"])
        if self.store.supports_transactions:
            with suppress(InterruptedError), self.store.transaction():
                self.store.on_commit(lambda: calls.append("rolled back"))
                self.store.complete(self.claim(operation), RESPONSE)
                raise InterruptedError
            assert self.store.get(operation.key, operation.scope) is None
            assert self.completed(operation).attempt == 1
        assert calls == ["committed"]

    def test_replay_starts_a_new_lifetime(self) -> None:
        """With ``extend_on_replay`` the time to live counts from the last use."""
        operation = an_operation(ttl=MOMENT)
        self.completed(operation)
        self.expire(operation)
        longer = replace(operation, ttl=SECOND * 99, extend_on_replay=True)
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
        """Purge deletes expired records, the oldest first, up to its limit, after retention."""
        first, second = (an_operation(ttl=MOMENT) for _ in range(2))
        alive, kept = an_operation(), an_operation(ttl=MOMENT, retention=SECOND * 99)
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
        for operation in (alive, kept):
            assert self.record(operation).payload == RESPONSE

    def test_purge_and_leases(self) -> None:
        """A running operation is never purged; an interrupted one is, after its time to live."""
        running = self.leased(ttl=MOMENT)
        gone = self.interrupted(ttl=MOMENT)
        if not self.forgets_expired:
            eventually(lambda: self.store.purge(timedelta(0), 10) == 1)
            assert self.store.get(gone.key, gone.scope) is None
        assert self.store.purge(timedelta(0), 10) == 0
        assert self.store.complete(running, RESPONSE)
