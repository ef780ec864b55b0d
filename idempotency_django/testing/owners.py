"""Owners of keys, one after another: claims, answers, replays, the end of a record."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from datetime import timedelta

from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import ImproperlyConfigured

from ..policy import DEFAULTS
from ..records import Claim, Payload, Record, Status
from .setting import ContractSetting
from .support import ANSWER, SECOND, an_operation, eventually, in_threads


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
        with self.store.transaction():
            first, second = self.claim(one), self.claim(other)
            assert (first.attempt, second.attempt) == (1, 1)
            assert first.operation == one
            assert first.token != second.token
            self.store.fail(first, "")
            self.store.fail(second, "")

    def test_completed_record_is_returned(self) -> None:
        """After completion, every request gets the record with exactly its answer."""
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
        """``get`` returns the record and claims nothing."""
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

    def test_failed_attempt_is_repeated(self) -> None:
        """The same request claims its key again after each failure, with a lease and without."""
        for lease in (None, SECOND * 99):
            operation = an_operation(lease=lease)
            for attempt in (1, 2, 3):
                with self.store.transaction() if lease is None else nullcontext():
                    claim = self.store.acquire(operation)
                    assert isinstance(claim, Claim), f"A failure frees its key, not: {claim}"
                    assert claim.attempt == attempt
                    assert self.store.fail(claim, "ValueError: no")

    def test_expired_key_is_free(self) -> None:
        """After its time to live, a record is no longer replayed."""
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
        """An owner that lost its claim can neither complete nor fail it."""
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
        """A callback for the commit is called after it, once, and never after a rollback."""
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

    # For callers that are async.

    def test_called_from_an_event_loop(self) -> None:
        """In the thread where an event loop calls it, each method does what it always does."""

        async def both() -> None:
            claim = await sync_to_async(self.store.acquire)(an_operation(lease=SECOND * 99))
            assert isinstance(claim, Claim)
            assert await sync_to_async(self.store.extend)(claim, 99)
            assert await sync_to_async(self.store.complete)(claim, ANSWER)
            assert not await sync_to_async(self.store.fail)(claim, "late")
            record = await sync_to_async(self.store.get)(claim.key, claim.scope)
            assert record is not None
            assert record.payload == ANSWER
            await sync_to_async(self.store.record_replay)(record, claim.operation)
            known = await sync_to_async(self.store.recall)(claim.operation)
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
        """A record in progress is not purged, however old it is."""
        operation = an_operation(ttl=timedelta(milliseconds=1))
        with self.store.transaction():
            claim = self.claim(operation)
            assert self.store.purge(timedelta(0), 10) == 0
            assert self.store.complete(claim, ANSWER)
