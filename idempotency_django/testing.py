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
from datetime import timedelta
from typing import ClassVar, TypeVar
from uuid import uuid4

from django.db import connections

from .records import Claim, Operation, Payload, Record, Status
from .stores import Store

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which a test gives up waiting for something that should have happened."""

SECOND = timedelta(seconds=1)
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
        eventually(lambda: self.record(operation).expired)

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
        assert self.completed(an_operation(key=operation.key)).attempt == 2
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
