"""For tests: the contract that every store keeps, as a suite that any store can be run through.

::

    class TestMyStore(StoreContract):
        @pytest.fixture(autouse=True)
        def _store(self, transactional_db):
            self.store = MyStore("default")

It needs no test framework of its own: the methods named ``test_…`` are plain functions with
``assert``, and ``self.store`` is the store. Run it with a real transaction per test, not within
one: it uses threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import ClassVar, TypeVar
from uuid import uuid4

from asgiref.sync import async_to_sync
from django.db import connections

from .errors import ClaimLost
from .records import Claim, Operation, Payload, Record, Status, Step
from .stores import Store

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which a test gives up waiting for something that should have happened."""

SECOND = timedelta(seconds=1)
MOMENT = timedelta(milliseconds=1)
ANSWER = Payload(201, (("Content-Type", "text/plain"), ("Location", "/charges/1")), b"\x00\xff one")


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
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "It did not happen."
        time.sleep(0.001)


class StoreContract:
    """Subclass it and set ``self.store`` before each test."""

    store: Store

    tells_at_once: ClassVar[bool] = True
    """Whether a duplicate is told "in progress" while the owner holds on; SQLite makes it wait."""

    forgets_expired: ClassVar[bool] = False
    """Whether an expired record is gone by itself, so that its key starts over with attempt 1."""

    # What a test does with the store, each in a transaction of its own.

    def acquire(self, operation: Operation) -> Claim | Record:
        """Acquire and let go: with a store that has transactions, the claim ends with the call."""
        with self.store.transaction():
            return self.store.acquire(operation)

    def claim(self, operation: Operation) -> Claim:
        """Acquire within a transaction of the caller's."""
        claim = self.store.acquire(operation)
        assert isinstance(claim, Claim)
        return claim

    def completed(self, operation: Operation, payload: Payload = ANSWER) -> Claim:
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
        """The operation's record, which is there."""
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

    # One owner after another.

    def test_first_acquire_claims(self) -> None:
        """A key without a record is claimed, as attempt 1, with a token of its own."""
        one, other = an_operation(), an_operation()
        with self.store.transaction():
            first, second = self.claim(one), self.claim(other)
            assert (first.attempt, second.attempt) == (1, 1)
            assert first.operation == one
            assert first.token != second.token
            self.store.fail(first, "")
            self.store.fail(second, "")

    def test_completed_record_is_returned(self) -> None:
        """After completion the record is returned with the very answer, for whatever is asked."""
        operation = an_operation()
        self.completed(operation)
        found = self.acquire(operation)
        assert isinstance(found, Record)
        assert (found.status, found.payload) == (Status.COMPLETED, ANSWER)
        assert (found.fingerprint, found.attempt, found.expired) == ("f" * 64, 1, False)
        other = self.acquire(an_operation(key=operation.key, fingerprint="0" * 64))
        assert isinstance(other, Record)
        assert other.fingerprint == "f" * 64

    def test_answers_survive_exactly(self) -> None:
        """Empty and binary bodies, repeated headers, and tombstones come back as they were."""
        answers = [
            Payload(204, (), b""),
            Payload(
                200, (("Link", "<a>"), ("Link", "<b>"), ("X-Text", 'é, "q"')), bytes(range(256))
            ),
            Payload(200, (("Content-Type", "text/csv"),), None),
        ]
        for answer in answers:
            operation = an_operation()
            self.completed(operation, answer)
            assert self.record(operation).payload == answer

    def test_get_reads_only(self) -> None:
        """``get`` says what is there and claims nothing."""
        operation = an_operation()
        assert self.store.get(operation.key, operation.scope) is None
        assert isinstance(self.acquire(operation), Claim)

    def test_key_belongs_to_its_scope(self) -> None:
        """The same key in another scope, and a key in other letters, is another operation."""
        operation = an_operation(key="Key-a", scope="user:Bob")
        self.completed(operation)
        for key, scope in [("Key-a", "user:bob"), ("key-A", "user:Bob"), ("Key-a", "user:Bob2")]:
            with self.store.transaction():
                claim = self.claim(an_operation(key=key, scope=scope))
                self.store.fail(claim, "")

    def test_failed_key_is_free(self) -> None:
        """A failed attempt leaves the key free; the next one is attempt 2, whatever it asks for."""
        operation = an_operation()
        self.failed(operation)
        assert self.record(operation).status is Status.FAILED
        assert self.record(operation).payload is None
        again = an_operation(key=operation.key, fingerprint="0" * 64)
        assert self.completed(again).attempt == 2
        assert self.record(operation).fingerprint == "0" * 64

    def test_expired_key_is_free(self) -> None:
        """After its time to live a record is replayed no more."""
        operation = an_operation(ttl=timedelta(milliseconds=1))
        self.completed(operation)
        self.expire(operation)
        again = self.completed(an_operation(key=operation.key))
        assert again.attempt == (1 if self.forgets_expired else 2)
        assert not self.record(operation).expired

    def test_permanent_record_stays(self) -> None:
        """Without a time to live a record neither expires nor is purged."""
        operation = an_operation(ttl=None)
        self.completed(operation)
        assert not self.record(operation).expired
        assert self.store.purge(timedelta(0), 100) == 0

    def test_late_owner_writes_nothing(self) -> None:
        """Who lost a claim can neither complete nor fail it, before and after its successor did."""
        operation = an_operation()
        late = self.failed(operation)
        with self.store.transaction():
            successor = self.claim(operation)
            assert not self.store.complete(late, ANSWER)
            assert not self.store.fail(late, "late")
            assert self.store.complete(successor, ANSWER)
        with self.store.transaction():
            assert not self.store.fail(late, "late")
            assert not self.store.fail(successor, "a second time")
        assert self.record(operation).payload == ANSWER

    def test_rollback_leaves_nothing(self) -> None:
        """A claim that is rolled back was never there."""
        if not self.store.supports_transactions:
            return
        operation = an_operation()
        try:
            with self.store.transaction():
                self.store.complete(self.claim(operation), ANSWER)
                raise InterruptedError
        except InterruptedError:
            pass
        assert self.store.get(operation.key, operation.scope) is None
        assert self.completed(operation).attempt == 1

    def test_on_commit_follows_the_transaction(self) -> None:
        """What waits for the commit is called after it, once, and never after a rollback."""
        calls: list[str] = []
        with self.store.transaction():
            self.store.on_commit(lambda: calls.append("committed"))
            assert calls == ([] if self.store.supports_transactions else ["committed"])
        try:
            with self.store.transaction():
                if self.store.supports_transactions:
                    self.store.on_commit(lambda: calls.append("rolled back"))
                raise InterruptedError
        except InterruptedError:
            pass
        assert calls == ["committed"]

    # Leases. A claim with a lease is made outside any transaction, for all to see.

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
        [found, other] = in_threads(
            [lambda: self.again(claim), lambda: self.again(claim, fingerprint="0" * 64)]
        )
        assert _said(found) == _said(other) == "in progress"
        assert self.store.complete(claim, ANSWER)
        assert self.record(claim.operation).payload == ANSWER

    def test_lease_ends(self) -> None:
        """After its lease a claim is taken over, as the next attempt and with another token."""
        late = self.interrupted()
        claim = self.taken_over(late)
        assert (claim.attempt, claim.token == late.token) == (2, False)
        assert not self.record(claim.operation).interrupted
        assert self.store.complete(claim, ANSWER)
        assert self.record(claim.operation).attempt == 2

    def test_late_owner_of_a_lease_writes_nothing(self) -> None:
        """Who was taken over can neither complete, fail nor extend, now or ever after."""
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
        """Who is late, but was not taken over, may still complete, or go on."""
        claim = self.interrupted()
        assert self.store.extend(claim, 99)
        assert not self.record(claim.operation).interrupted
        assert _said(self.again(claim)) == "in progress"
        assert self.store.complete(self.interrupted(), ANSWER)

    def test_settled_claim_cannot_be_extended(self) -> None:
        """What is completed or failed has no lease any more."""
        claim, failed = self.leased(), self.leased()
        assert self.store.complete(claim, ANSWER)
        assert self.store.fail(failed, "no")
        assert not self.store.extend(claim, 99)
        assert not self.store.extend(failed, 99)
        assert not self.store.complete(claim, Payload(200, (), b"another"))
        assert self.record(claim.operation).payload == ANSWER

    def test_failed_lease_is_free(self) -> None:
        """A claim that its owner has failed is free at once, before its lease is over."""
        claim = self.leased()
        assert self.store.fail(claim, "ValueError: no")
        assert self.record(claim.operation).status is Status.FAILED
        assert self.taken_over(claim).attempt == 2

    def test_another_request_resumes_nothing(self) -> None:
        """An interrupted attempt is not resumed by a request that asks for something else."""
        late = self.interrupted()
        found = self.again(late, fingerprint="0" * 64)
        assert isinstance(found, Record)
        assert (found.status, found.fingerprint) == (Status.IN_PROGRESS, "f" * 64)
        assert self.taken_over(late).attempt == 2

    def test_held_claim_is_not_taken_over(self) -> None:
        """An interrupted attempt that is to be held is not resumed, and its owner may complete."""
        late = self.interrupted(hold=True)
        found = self.again(late)
        assert isinstance(found, Record)
        assert (found.interrupted, found.held) == (True, True)
        assert self.record(late.operation).held
        assert self.store.purge(timedelta(0), 10) == 0
        assert self.store.complete(late, ANSWER)

    def test_one_of_many_takes_over_a_lease(self) -> None:
        """Of simultaneous contenders for an interrupted claim one has it, the others are told."""
        late = self.interrupted()
        found = in_threads([lambda: self.again(late, lease=SECOND * 99)] * 16)
        [claim] = [one for one in found if isinstance(one, Claim)]
        assert claim.attempt == 2
        assert {_said(one) for one in found if one is not claim} == {"in progress"}
        assert self.store.complete(claim, ANSWER)

    def test_one_of_many_leases(self) -> None:
        """Of simultaneous duplicates one has the lease, the others are told at once."""
        operation = an_operation(lease=SECOND * 99)
        found = in_threads([lambda: self.store.acquire(operation)] * 16)
        assert sum(isinstance(one, Claim) for one in found) == 1
        assert {_said(one) for one in found if isinstance(one, Record)} == {"in progress"}

    def test_expired_key_is_free_for_a_lease(self) -> None:
        """After its time to live a record is claimed anew, whatever is asked for."""
        operation = an_operation(ttl=MOMENT)
        self.completed(operation)
        self.expire(operation)
        claim = self.store.acquire(replace(operation, lease=SECOND * 99, fingerprint="0" * 64))
        assert isinstance(claim, Claim)
        assert claim.attempt == (1 if self.forgets_expired else 2)

    def test_purge_and_leases(self) -> None:
        """What runs is never purged; what was interrupted goes when its life is over."""
        running = self.leased(ttl=MOMENT)
        gone = self.interrupted(ttl=MOMENT)
        if not self.forgets_expired:
            eventually(lambda: self.store.purge(timedelta(0), 10) == 1)
            assert self.store.get(gone.key, gone.scope) is None
        assert self.store.purge(timedelta(0), 10) == 0
        assert self.store.complete(running, ANSWER)

    # Recovery points.

    def step(self, claim: Claim, position: int, name: str) -> bool:
        """Store a step in a transaction of its own."""
        step = Step(position=position, name=name, attempt=claim.attempt, result="[1, null]")
        with self.store.durable("The step"):
            return self.store.save_step(claim, step)

    def names(self, claim: Claim) -> list[str]:
        """The names of the stored steps, in order."""
        return [step.name for step in self.store.steps(claim)]

    def test_steps_survive(self) -> None:
        """Steps are there for the attempts that follow a failure or an interruption, in order."""
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
        """Who was taken over adds no step to what its successor does."""
        if not self.store.supports_steps:
            return
        late = self.interrupted()
        claim = self.taken_over(late)
        assert not self.step(late, 0, "late")
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

    def test_steps_end_with_their_record(self) -> None:
        """What comes after the time to live is another operation, without the steps of the last."""
        if not self.store.supports_steps:
            return
        claim = self.leased(ttl=MOMENT)
        self.step(claim, 0, "debit")
        assert self.store.complete(claim, ANSWER)
        self.expire(claim.operation)
        assert self.names(self.taken_over(claim)) == []

    def test_fence(self) -> None:
        """A transaction within the fence commits for the owner, and not for who was taken over."""
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

    # The same for callers that are async.

    def test_async_twins(self) -> None:
        """Each async method does what the other does."""

        async def both() -> None:
            claim = await self.store.aacquire(an_operation(lease=SECOND * 99))
            assert isinstance(claim, Claim)
            assert await self.store.aextend(claim, 99)
            assert await self.store.acomplete(claim, ANSWER)
            assert not await self.store.afail(claim, "late")
            record = await self.store.aget(claim.key, claim.scope)
            assert record is not None
            assert record.payload == ANSWER
            await self.store.arecord_replay(record, claim.operation)
            known = await self.store.arecall(claim.operation)
            assert known is None or known.payload == ANSWER

        async_to_sync(both)()

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
        assert kept.payload == ANSWER
        if self.store.supports_transactions:  # the memory store keeps the time to live it knows
            assert not kept.expired

    def test_simultaneous_replays(self) -> None:
        """Simultaneous replays neither wait for one another nor are refused."""
        operation = an_operation()
        self.completed(operation)

        def replay() -> Payload | None:
            with self.store.transaction():
                found = self.store.acquire(operation)
                assert isinstance(found, Record)
                if not found.counted:
                    self.store.record_replay(found, operation)
            return found.payload

        assert in_threads([replay] * 16) == [ANSWER] * 16

    # Races.

    def test_one_of_many_claims(self) -> None:
        """Of simultaneous duplicates one claims; the others are told so while it holds on."""
        self._race(an_operation())

    def test_one_of_many_takes_over_a_failed_key(self) -> None:
        """A failed record is taken again by one contender only."""
        operation = an_operation()
        self.failed(operation)
        self._race(operation)

    def test_one_of_many_takes_over_an_expired_key(self) -> None:
        """An expired record is taken again by one contender only."""
        operation = an_operation(ttl=timedelta(milliseconds=1))
        self.completed(operation)
        self.expire(operation)
        self._race(an_operation(key=operation.key))

    def test_refused_request_frees_nothing(self) -> None:
        """A third request, after a second was refused, does not get the first one's claim."""
        if not self.tells_at_once:
            return
        operation = an_operation()
        with self.store.transaction():
            claim = self.claim(operation)
            for _ in range(3):
                [found] = in_threads([lambda: self._attempt(operation)])
                assert found == "in progress"
            assert self.store.complete(claim, ANSWER)
        assert self._attempt(operation) == "completed"

    def _race(self, operation: Operation, contenders: int = 16) -> None:
        refused = threading.Semaphore(0)

        def contend() -> str:
            with self.store.transaction():
                found = self.store.acquire(operation)
                if isinstance(found, Claim):
                    # The owner holds on until all others have been told.
                    for _ in range(contenders - 1 if self.tells_at_once else 0):
                        assert refused.acquire(timeout=PATIENCE), "A duplicate had to wait."
                    assert self.store.complete(found, ANSWER)
                    return "claimed"
            refused.release()
            return _said(found)

        said = sorted(in_threads([contend] * contenders))
        if self.tells_at_once:
            assert said == ["claimed"] + ["in progress"] * (contenders - 1)
        else:
            assert said == ["claimed"] + ["completed"] * (contenders - 1)
        assert self.record(operation).payload == ANSWER

    def _attempt(self, operation: Operation) -> str:
        return _said(self.acquire(operation))

    # The end of a record.

    def test_purge_takes_the_oldest(self) -> None:
        """Purge deletes what is expired, the oldest first, at most as many as it is told."""
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
            assert self.store.purge(timedelta(0), 10) == self.store.purgeable(timedelta(0)) == 0
            return
        eventually(lambda: self.store.purgeable(timedelta(0)) == 2)
        assert self.store.purge(SECOND * 99, 10) == 0
        assert self.store.purge(timedelta(0), 1) == 1
        assert self.store.get(first.key, first.scope) is None
        assert self.store.purge(timedelta(0), 10) == 1
        assert self.store.purge(timedelta(0), 10) == 0
        assert self.store.purgeable(timedelta(0)) == 0
        for operation in (alive, kept):
            assert self.record(operation).payload == ANSWER

    def test_purge_spares_what_is_in_progress(self) -> None:
        """What is in progress is not purged, however long it has been."""
        operation = an_operation(ttl=timedelta(milliseconds=1))
        with self.store.transaction():
            claim = self.claim(operation)
            assert self.store.purge(timedelta(0), 10) == 0
            assert self.store.complete(claim, ANSWER)


def _said(found: Claim | Record) -> str:
    assert isinstance(found, Record)
    return found.status.replace("_", " ")
