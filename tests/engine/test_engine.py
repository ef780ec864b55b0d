"""The engine: outcomes, rollback, signals, waiting; on the memory store and on real databases."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import replace
from datetime import timedelta

import pytest
from django.contrib.admin.models import ADDITION, LogEntry
from django.db import DatabaseError, IntegrityError, OperationalError, connection, transaction

from idempotency_django import engine
from idempotency_django.engine import Executed, InProgress, Mismatched, Outcome, Replayed, Result
from idempotency_django.engine.outcomes import BACKOFF
from idempotency_django.errors import OperationInProgress, StoreUnavailable
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import Store, dialects
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim, Operation, Payload, Record, Status
from idempotency_django.testing import PATIENCE, an_operation, in_threads
from tests.models import Effect
from tests.support.attempts import STORED, found
from tests.support.shared import effects

pytestmark = pytest.mark.django_db(transaction=True)

WAIT = timedelta(seconds=10)


@pytest.fixture(params=[MemoryStore, DatabaseStore])
def store(request: pytest.FixtureRequest) -> Store:
    """A store without and one with transactions."""
    return request.param("default")


def skip_where_duplicates_queue(store: Store) -> None:
    """SQLite's one write lock makes a duplicate wait inside the database."""
    if connection.vendor == "sqlite" and store.supports_transactions:
        pytest.skip("SQLite makes a duplicate wait by itself")


def effect(claim: Claim) -> Result:
    """Do it and return a response."""
    Effect.objects.create(reference="a")
    return Result("response", STORED)


def fail(claim: Claim) -> Result:
    """Do nothing, and say so."""
    return Result("no", None, error="no", failed=True)


def dangling(claim: Claim) -> Result:
    """Do what PostgreSQL and SQLite refuse at COMMIT only."""
    LogEntry.objects.create(user_id=10**6, action_flag=ADDITION)
    return effect(claim)


def run(
    store: Store,
    operation: Operation,
    execute: Callable[[Claim], Result] = effect,
    recover: Callable[[Exception], Result] = engine.reraise,
    *,
    wait: timedelta | None = None,
) -> Outcome:
    lease = None if store.supports_transactions else timedelta(seconds=30)
    operation = replace(operation, lease=lease, wait=wait)
    return engine.run(store, operation, execute, recover)


def once(
    within: bool, store: Store, operation: Operation, execute: Callable[[Claim], Result] = effect
) -> Outcome:
    """Run it in a transaction of its own, or within one that the caller has opened."""
    if not within:
        return run(store, operation, execute)
    with transaction.atomic():
        return run(store, operation, execute)


@contextmanager
def held(
    store: Store, operation: Operation, then: Callable[[Claim], Result] = effect
) -> Iterator[Callable[[], Outcome]]:
    """The operation is being executed by somebody else until the block ends; gives the outcome."""
    started, finish = threading.Event(), threading.Event()
    outcomes: list[Outcome] = []

    def execute(claim: Claim) -> Result:
        started.set()
        assert finish.wait(PATIENCE)
        return then(claim)

    def work() -> None:
        outcomes.extend(in_threads([lambda: run(store, operation, execute)]))

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(PATIENCE)

    def ended() -> Outcome:
        finish.set()
        thread.join(PATIENCE)
        return outcomes[0]

    try:
        yield ended
    finally:
        ended()


class TestRun:
    """One operation from claim to response."""

    def test_executes_once(self, store: Store, sent: list[str]) -> None:
        """The first call executes, the second is a replay of its response; another request under
        the same key is not executed.
        """
        operation = an_operation()
        assert run(store, operation) == Executed("response")
        replay = run(store, operation)
        assert isinstance(replay, Replayed)
        assert replay.record.payload == STORED
        other = an_operation(key=operation.key, fingerprint="0" * 64)
        assert isinstance(run(store, other), Mismatched)
        assert effects() == 1
        assert sent == ["claimed", "completed", "replayed", "mismatched"]

    def test_raised_error(self, store: Store, sent: list[str]) -> None:
        """What the handler raises rolls back and goes on to the caller, as itself."""

        def explode(claim: Claim) -> Result:
            effect(claim)
            raise LookupError("boom")

        operation = an_operation()
        with pytest.raises(LookupError, match="boom") as raised:
            run(store, operation, explode)
        assert raised.value.__cause__ is None
        assert raised.value.__context__ is None
        found = store.get(operation.key, operation.scope)
        assert found is not None
        assert found.status is Status.FAILED
        assert run(store, operation) == Executed("response")
        assert effects() == (1 if store.supports_transactions else 2)
        assert sent == ["claimed", "failed", "claimed", "completed"]

    def test_recovered_error(self, store: Store, sent: list[str]) -> None:
        """The response that an adapter makes of an error is given, and kept if it has a payload."""

        def explode(claim: Claim) -> Result:
            effect(claim)
            raise LookupError("boom")

        kept = Payload(404, (), b"none")
        operation = an_operation()
        outcome = run(store, operation, explode, lambda error: Result("none", lambda: kept))
        assert outcome == Executed("none")
        replay = run(store, operation)
        assert isinstance(replay, Replayed)
        assert replay.record.payload == kept
        assert effects() == (0 if store.supports_transactions else 1)
        assert sent == ["claimed", "completed", "replayed"]

    def test_failed_record_is_no_response(self) -> None:
        """Where somebody else's store shows a failed record, a retry is told to come back."""
        operation = an_operation()
        failed = Record(
            key=operation.key,
            scope=operation.scope,
            status=Status.FAILED,
            fingerprint=operation.fingerprint,
        )
        assert engine.decide(failed, operation) == InProgress()


class TestConflict:
    """A duplicate while the first is being executed."""

    def test_wait(self, store: Store, sent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """If it may wait, it waits for the first to finish and replays its response."""
        skip_where_duplicates_queue(store)
        operation = an_operation()
        with held(store, operation) as ended:
            monkeypatch.setattr(time, "sleep", lambda seconds: ended())
            outcome = run(store, operation, wait=WAIT)
        assert isinstance(outcome, Replayed)
        assert effects() == 1
        assert sent == ["claimed", "completed", "replayed"]

    def test_wait_for_a_failure(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """When the first fails, who waited executes."""
        skip_where_duplicates_queue(store)
        operation = an_operation()
        with held(store, operation, fail) as ended:
            monkeypatch.setattr(time, "sleep", lambda seconds: ended())
            assert run(store, operation, wait=WAIT) == Executed("response")
        assert effects() == 1

    def test_wait_is_bounded(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """After that time it is told "in progress" after all; the pauses fit into it."""
        skip_where_duplicates_queue(store)
        clock = [100.0]
        pauses: list[float] = []

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            clock[0] += seconds

        operation = an_operation()
        with held(store, operation):
            monkeypatch.setattr(dialects, "PAUSES", (0,))  # which are no pauses of the wait
            monkeypatch.setattr(time, "monotonic", lambda: clock[0])
            monkeypatch.setattr(time, "sleep", sleep)
            outcome = run(store, operation, wait=timedelta(seconds=3))
            assert isinstance(outcome, InProgress)
        assert sum(pauses) == pytest.approx(3)
        assert max(pauses) <= BACKOFF.longest.total_seconds()
        assert len(pauses) > 10


class TestTransaction:
    """The effect and its response commit together."""

    @pytest.mark.parametrize("nested", [False, True])
    def test_handler_that_calls_its_own_key(self, nested: bool) -> None:
        """It is in progress, also within another operation: a database's locks are re-entrant."""
        store, operation, found = DatabaseStore("default"), an_operation(), []

        def again(claim: Claim) -> Result:
            found.append(run(store, operation, again))
            return effect(claim)

        def between(claim: Claim) -> Result:
            run(store, an_operation(), again)
            return effect(claim)

        run(store, operation, between if nested else again)
        assert found == [InProgress()]
        assert effects() == 1 + nested

    def test_context_that_outlives_its_handler(self) -> None:
        """What has copied a handler's context gets the response once the operation is completed."""
        store, operation = DatabaseStore("default"), an_operation()
        copies: list[Context] = []

        def work(claim: Claim) -> Result:
            copies.append(copy_context())
            return effect(claim)

        run(store, operation, work)
        assert isinstance(copies[0].run(run, store, operation, work), Replayed)
        assert effects() == 1

    def test_swallowed_database_error(self) -> None:
        """A database error that the handler swallowed does not end in a commit of half the work."""

        def swallow(claim: Claim) -> Result:
            effect(claim)
            with pytest.raises(DatabaseError), connection.cursor() as cursor:
                cursor.execute("SELECT * FROM nowhere")
            return Result("response", STORED)

        store, operation = DatabaseStore("default"), an_operation()
        if connection.vendor == "postgresql":
            with pytest.raises(DatabaseError):
                run(store, operation, swallow)
            assert effects() == 0
        else:
            assert run(store, operation, swallow) == Executed("response")
            assert effects() == 1

    @pytest.mark.parametrize("within", [False, True])
    @pytest.mark.parametrize(
        "error", [LookupError, OperationInProgress, OperationalError, IntegrityError]
    )
    def test_hook_that_raises_ours(
        self, error: type[Exception], within: bool, sent: list[str]
    ) -> None:
        """What a hook raises is nothing that became of the operation: that is committed."""

        def broken() -> None:
            raise error

        def execute(claim: Claim) -> Result:
            transaction.on_commit(broken)
            return effect(claim)

        store, operation = DatabaseStore("default"), an_operation()
        with pytest.raises(error):
            once(within, store, operation, execute)
        assert sent == ["claimed", "completed"]
        assert isinstance(run(store, operation, execute), Replayed)
        assert effects() == 1

    def test_response_of_another_request_is_not_its_own(self, sent: list[str]) -> None:
        """One that completes the operation between a rollback and its recording has the record."""
        store, operation = DatabaseStore("default"), an_operation()

        def recover(error: Exception) -> Result:
            assert isinstance(run(store, operation), Executed)
            return Result("mine", Payload(404, (), b"mine"), error="no")

        def execute(claim: Claim) -> Result:
            raise LookupError

        outcome = engine.run(store, operation, execute, recover)
        assert isinstance(outcome, Executed)
        assert (outcome.response, outcome.payload) == ("mine", None)
        assert sent == ["claimed", "claimed", "completed", "released"]

    @pytest.mark.parametrize("within", [False, True])
    def test_constraint_that_is_checked_at_commit(self, sent: list[str], within: bool) -> None:
        """What is refused at COMMIT has failed, as if the handler had raised it."""
        store, operation = DatabaseStore("default"), an_operation()
        with pytest.raises(IntegrityError):
            once(within, store, operation, dangling)
        assert effects() == 0
        if not within:  # the caller's commit is the caller's affair
            row = IdempotencyKey.objects.get()
            assert (row.status, row.attempt) == (Status.FAILED, 1)
            assert row.error.startswith("IntegrityError: ")
        assert once(within, store, operation) == Executed("response")
        ends = [] if within and connection.vendor != "mysql" else ["failed"]
        assert sent == ["claimed", *ends, "claimed", "completed"]
        assert effects() == 1

    def test_marked_for_rollback_within_a_transaction_of_the_caller(self) -> None:
        """A refusal that is marked for rollback takes nothing of the caller's with it."""

        def refuse(claim: Claim) -> Result:
            effect(claim)
            transaction.set_rollback(True)
            return Result("refused", Payload(400, (), b"no"))

        with transaction.atomic():
            Effect.objects.create(reference="before")
            assert run(DatabaseStore("default"), an_operation(), refuse) == Executed("refused")
        assert (effects("before"), effects()) == (1, 0)

    def test_within_a_transaction_of_the_caller(self, sent: list[str]) -> None:
        """Inside somebody's transaction the response lives and dies with that transaction."""
        store, operation = DatabaseStore("default"), an_operation()
        with pytest.raises(InterruptedError), transaction.atomic():
            assert run(store, operation) == Executed("response")
            raise InterruptedError
        assert sent == ["claimed"]
        assert effects() == 0
        assert store.get(operation.key, operation.scope) is None
        with transaction.atomic():
            run(store, operation)
        assert isinstance(run(store, operation), Replayed)
        assert effects() == 1

    def test_recovered(self) -> None:
        """The response to an error is made while the caller's transaction takes queries. If that
        marks it for rollback, only the attempt is rolled back, which it was already.
        """

        def explode(claim: Claim) -> Result:
            effect(claim)
            transaction.set_rollback(True)
            raise LookupError

        def recover(error: Exception) -> Result:
            assert not transaction.get_rollback()
            transaction.set_rollback(True)
            return Result("none", None, error="no")

        with transaction.atomic():
            Effect.objects.create(reference="before")
            outcome = run(DatabaseStore("default"), an_operation(), explode, recover)
            assert outcome == Executed("none")
            assert not transaction.get_rollback()
        assert (effects("before"), effects()) == (1, 0)
        assert IdempotencyKey.objects.get().status == Status.FAILED

    def test_busy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A busy store is in progress, within the caller's transaction too."""
        store = DatabaseStore("default")

        def busy(operation: Operation) -> Claim:
            raise OperationInProgress

        monkeypatch.setattr(store, "acquire", busy)
        for within in (False, True):
            assert isinstance(once(within, store, an_operation()), InProgress)


class TestAudit:
    """How a failed attempt is written down."""

    def test_response_that_cannot_be_made(self, sent: list[str]) -> None:
        """Where the response to an error cannot be made, that is why the attempt has failed."""

        def explode(claim: Claim) -> Result:
            raise LookupError

        def unmade() -> Payload:
            raise TypeError("no JSON")

        with pytest.raises(TypeError, match="no JSON"):
            run(
                DatabaseStore("default"),
                an_operation(),
                explode,
                lambda error: Result("none", unmade),
            )
        assert IdempotencyKey.objects.get().error == "TypeError: no JSON"
        assert sent == ["claimed", "failed"]

    def test_error_without_a_text(self, store: Store) -> None:
        """An error whose text cannot be made is raised as itself, and the record names it."""

        class Unprintable(Exception):
            def __str__(self) -> str:
                raise ValueError("no text")

            __repr__ = __str__

        def explode(claim: Claim) -> Result:
            raise Unprintable

        operation = an_operation()
        with pytest.raises(Unprintable):
            run(store, operation, explode)
        assert found(store, operation).status is Status.FAILED
        if store.supports_transactions:
            assert "Unprintable" in IdempotencyKey.objects.get().error
        assert run(store, operation) == Executed("response")

    def test_unreachable_store_does_not_hide_the_error(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sent: list[str]
    ) -> None:
        """When the failure cannot be recorded, it is logged and the client gets its response."""
        store = DatabaseStore("default")

        def unreachable(claim: Claim, error: str, **_: object) -> bool:
            raise StoreUnavailable

        monkeypatch.setattr(store, "fail", unreachable)
        outcome = run(store, an_operation(), lambda claim: Result("no", None, error="refused"))
        assert outcome == Executed("no")
        assert "refused" in caplog.text
        assert sent == ["claimed", "released"]
