"""Leases: the heartbeat, late owners, and stores that cannot be reached."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from django.db import (
    DatabaseError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    connection,
    connections,
    transaction,
)

from idempotency_django import engine
from idempotency_django.engine import Executed, Held, InProgress, Outcome, Replayed, Result
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.errors import ClaimLost, OperationInProgress, StoreUnavailable
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import Store
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim, Operation, Payload, Status, encode
from idempotency_django.testing import PATIENCE, eventually
from tests.models import Effect
from tests.support.attempts import LEASE, STORED, attempt, found, interrupt, leased, taken_over
from tests.support.nightly import few
from tests.support.shared import cut_connection, effects

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.usefixtures("sent"),  # so that every signal has somebody who listens
]

LONG, SHORT = LEASE, timedelta(seconds=0.3)
OTHER = Payload(200, (), b"the successor's")


class Watched(Store):
    """Notes what it is asked, and fails when it is told to, before or after it has done it."""

    def __init__(self, alias: str, **options: Any) -> None:
        super().__init__(alias, **options)
        self.asked: list[tuple[str, str]] = []
        self.replied: list[tuple[str, str]] = []
        self.faults: dict[str, list[str]] = {}
        self.error: type[Exception] = StoreUnavailable
        self.heartbeats: set[Any] = set()

    def times(self, method: str, operation: Operation) -> int:
        """How often it was asked this of the operation."""
        return self.asked.count((method, operation.key))

    def _ask(self, method: str, key: str, function: Callable[[], Any]) -> Any:
        self.asked.append((method, key))
        faults = self.faults.get(method)
        fault = faults.pop(0) if faults else ""
        if fault == "before":
            raise self.error
        response = function()
        self.replied.append((method, key))
        if fault == "after":
            raise self.error
        return response


def watched(name: str) -> Any:
    """A method of the store that is watched."""

    def method(self: Watched, *given: Any, **options: Any) -> Any:
        if threading.current_thread().name.startswith("idempotency-heartbeat"):
            self.heartbeats.add(connections["default"])
        inner = partial(getattr(super(Watched, self), name), *given, **options)
        return self._ask(name, getattr(given[0], "key", given[0]), inner)

    return method


for each in ("acquire", "complete", "fail", "get", "extend"):
    setattr(Watched, each, watched(each))


class WatchedMemory(Watched, MemoryStore):
    pass


class WatchedDatabase(Watched, DatabaseStore):
    pass


@pytest.fixture(params=[WatchedMemory, WatchedDatabase])
def store(request: pytest.FixtureRequest) -> Watched:
    """A store in memory and one in the database, each with a heartbeat of its own."""
    made: Watched = request.param(str(uuid4()))
    return made


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause between the tries to store a response."""
    monkeypatch.setattr(engine.leased, "PERSISTENCE", (0.0,) * 5)


def effect(execution: ExecutionContext | None) -> None:
    Effect.objects.create(reference="a")


def settle_by_hand(store: Store, operation: Operation) -> None:
    """Complete an interrupted operation, as an operator does: with a token, but no attempt."""
    interrupt(store, operation)
    if isinstance(store, MemoryStore):
        entry = store._entries[operation.key, operation.scope]
        entry.token, entry.status = "operator", Status.COMPLETED
        entry.payload = encode(OTHER)
    else:
        IdempotencyKey.objects.filter(key=operation.key).update(
            owner_token="operator",
            lease_expires_at=None,
            status=Status.COMPLETED,
            response_status=OTHER.status,
            response_headers="[]",
            response_body=OTHER.body,
        )


def forget(store: Store, operation: Operation) -> None:
    if isinstance(store, MemoryStore):
        del store._entries[operation.key, operation.scope]
    else:
        IdempotencyKey.objects.filter(key=operation.key).delete()


class TestHeartbeat:
    """A lease lives as long as its handler runs."""

    def test_renews(self, store: Watched) -> None:
        """While the handler runs nobody can take it over, after its first lease either."""
        operation = leased(lease=timedelta(seconds=3))

        def handler(execution: ExecutionContext | None) -> None:
            for times in range(1, 5):  # one more than the first lease has time for
                eventually(lambda: store.times("extend", operation) >= times)  # noqa: B023
                assert isinstance(attempt(store, operation, effect), InProgress)

        assert isinstance(attempt(store, operation, handler), Executed)
        assert found(store, operation).attempt == 1
        assert effects() == 0

    def test_short_handlers_ask_nothing(self, store: Watched) -> None:
        """A handler that is over before its lease is due costs no statement of the heartbeat."""
        short, longer = leased(), leased(lease=SHORT)
        attempt(store, short, effect)
        attempt(store, longer, lambda e: eventually(lambda: store.times("extend", longer) >= 2))
        assert store.times("extend", short) == 0

    def test_connection_of_its_own(self) -> None:
        """The heartbeat asks on a connection of its own, and closes it."""
        store = WatchedDatabase(str(uuid4()))
        operation = leased(lease=SHORT)
        seen: list[bool] = []

        def handler(execution: ExecutionContext | None) -> None:
            with transaction.atomic():  # which is the heartbeat's no more than the handler's error
                Effect.objects.create(reference="a")
                if connection.vendor != "sqlite":  # whose one write lock is held here
                    eventually(lambda: store.times("extend", operation) >= 2)
            eventually(lambda: store.times("extend", operation) >= 3)
            seen.append(True)

        assert isinstance(attempt(store, operation, handler), Executed)
        assert connections["default"] not in store.heartbeats
        eventually(lambda: all(other.connection is None for other in store.heartbeats))
        assert seen == [True]

    @pytest.mark.parametrize("error", few([StoreUnavailable, OperationInProgress, ValueError]))
    def test_failing_store(
        self, store: Watched, error: type[Exception], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A renewal that fails is logged and tried again; the handler is not disturbed."""
        operation = leased(lease=timedelta(seconds=2))
        store.error, store.faults["extend"] = error, ["before"] * 3

        records: list[logging.LogRecord] = []

        def handler(execution: ExecutionContext | None) -> None:
            eventually(lambda: store.replied.count(("extend", operation.key)) >= 2)
            records.extend(caplog.records)  # a later renewal may meet the completion's lock

        with caplog.at_level(logging.WARNING, "idempotency_django"):
            assert isinstance(attempt(store, operation, handler), Executed)
        logged = [r for r in records if "could not be renewed; trying again" in r.message]
        assert len(logged) == 3
        assert all(r.exc_info and r.exc_info[0] is error for r in logged)

    def test_lost_claim(self, store: Watched, caplog: pytest.LogCaptureFixture) -> None:
        """A claim that is lost is logged, once, and its lease is renewed no more."""
        operation, going_on = leased(lease=SHORT), leased(lease=SHORT)

        def late(execution: ExecutionContext | None) -> None:
            successor = taken_over(store, operation)
            assert store.extend(successor, 60)
            eventually(lambda: "tried to renew its lease too late" in caplog.text)
            asked = store.times("extend", operation)
            attempt(
                store, going_on, lambda e: eventually(lambda: store.times("extend", going_on) > 3)
            )
            assert store.times("extend", operation) == asked

        with caplog.at_level(logging.WARNING, "idempotency_django"):
            assert isinstance(attempt(store, operation, late), InProgress)
        assert caplog.text.count("tried to renew its lease too late") == 1

    def test_thread_does_not_keep_the_process(self, store: Watched) -> None:
        """The thread is a daemon: a process that ends does not wait for it."""
        attempt(store, leased(), effect)
        [thread] = [t for t in threading.enumerate() if t.name == _thread_name(store)]
        assert thread.daemon

    def test_fork(self) -> None:
        """A forked process has a heartbeat of its own."""
        store, before = WatchedMemory(str(uuid4())), leased(lease=SHORT)

        def renewed(operation: Operation) -> Outcome:
            return attempt(
                store,
                operation,
                lambda e: eventually(lambda: store.times("extend", operation) >= 3),
            )

        renewed(before)
        child = _fork()
        if child == 0:
            try:
                assert isinstance(renewed(leased(lease=SHORT)), Executed)
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        renewed(leased(lease=SHORT))  # and the parent still has its own

    @pytest.mark.django_db(transaction=False)
    def test_inside_a_test_case(self) -> None:
        """In a test that is one transaction, which the heartbeat cannot look into, all goes on."""
        store, operation = WatchedDatabase(str(uuid4())), leased(lease=timedelta(seconds=3))

        def handler(execution: ExecutionContext) -> Any:
            lease = execution._lease
            assert lease is not None
            eventually(lambda: lease.is_over)  # the heartbeat could do nothing for it
            return execution.step("a", lambda: 1)

        assert attempt(store, operation, handler) == Executed(1)
        assert found(store, operation).payload == STORED


def _thread_name(store: Store) -> str:
    return f"idempotency-heartbeat-{store.alias}"


def _raises_after(handler: Callable[[ExecutionContext | None], object]) -> Callable[[Any], object]:
    def raising(execution: ExecutionContext | None) -> object:
        handler(execution)
        raise LookupError("boom")

    return raising


def _fork() -> int:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads, on purpose
        return os.fork()


@pytest.mark.driver
class TestLateOwner:
    """An owner that was taken over gives its successor's response, never its own."""

    def test_successor_completed(self, store: Watched, sent: list[str]) -> None:
        """The response that is stored is the one that is given."""
        operation = leased()

        def late(execution: ExecutionContext | None) -> None:
            assert store.complete(taken_over(store, operation), OTHER)

        outcome = attempt(store, operation, late)
        assert isinstance(outcome, Replayed)
        assert outcome.record.payload == OTHER
        assert found(store, operation).payload == OTHER
        assert sent == ["claimed", "lost", "replayed"]

    def test_successor_waited_for(self, store: Watched, elsewhere: ThreadPoolExecutor) -> None:
        """If it may wait, it waits for the successor's response."""
        operation = leased()

        def late(execution: ExecutionContext | None) -> None:
            claim = taken_over(store, operation)

            def complete() -> None:
                looked = store.times("get", operation)
                eventually(lambda: store.times("get", operation) >= looked + 2)
                assert store.complete(claim, OTHER)

            completing.append(elsewhere.submit(complete))

        completing: list[Any] = []
        outcome = attempt(store, operation, late, wait=LONG)
        completing[0].result(PATIENCE)
        assert isinstance(outcome, Replayed)
        assert outcome.record.payload == OTHER

    def test_successor_cannot_be_looked_for(
        self, store: Watched, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What its handler has done is not known then, so no new key is safe."""
        operation = leased()

        def away(*_: object) -> None:
            raise StoreUnavailable

        def late(execution: ExecutionContext | None) -> None:
            taken_over(store, operation)
            monkeypatch.setattr(store, "get", away)
            raise ClaimLost  # as a step or atomic() does

        with pytest.raises(StoreUnavailable, match="was interrupted") as caught:
            attempt(store, operation, late)
        error = caught.value
        assert (error.state, error.safe_new_key, error.retryable) == ("unknown", False, True)

    @pytest.mark.parametrize("hold", [True, False])
    def test_response_that_cannot_be_stored(
        self, store: Watched, monkeypatch: pytest.MonkeyPatch, hold: bool
    ) -> None:
        """The effects are committed: where that is to be held, nothing is executed again."""
        operation, calls = leased(hold=hold), []

        def broken(*_: object, **__: object) -> bool:
            raise LookupError("the codec")

        with monkeypatch.context() as patch, pytest.raises(LookupError):
            patch.setattr(store, "complete", broken)
            attempt(store, operation, calls.append)
        again = attempt(store, operation, calls.append)
        assert isinstance(again, InProgress if hold else Executed)
        assert len(calls) == (1 if hold else 2)

    @pytest.mark.parametrize("wait", [None, LONG])
    def test_successor_failed(self, store: Watched, wait: timedelta | None) -> None:
        """When the successor failed there is nothing to give: ``ClaimLost``."""
        operation, calls = leased(), []

        def late(execution: ExecutionContext | None) -> None:
            calls.append(execution)
            assert store.fail(taken_over(store, operation), "no")

        with pytest.raises(ClaimLost):
            attempt(store, operation, late, wait=wait)
        assert len(calls) == 1
        assert isinstance(attempt(store, operation, effect), Executed)

    def test_record_deleted(self, store: Watched) -> None:
        """When the record was deleted under it: ``ClaimLost``."""
        operation = leased()
        with pytest.raises(ClaimLost, match="deleted"):
            attempt(store, operation, lambda e: forget(store, operation))

    @pytest.mark.parametrize(
        "ending",
        [
            _raises_after(lambda e: None),
            lambda e: Result("x", None, error="The response had the status 503.", failed=True),
            lambda e: Result("x", None, error="The response had the status 409."),
        ],
        ids=["raised", "503", "409"],
    )
    def test_late_failure(self, store: Watched, ending: Any, sent: list[str]) -> None:
        """A late owner that fails frees nothing, and is announced as lost."""
        operation = leased()
        claims: list[Claim] = []

        def late(execution: ExecutionContext | None) -> object:
            claims.append(taken_over(store, operation))
            return ending(execution)

        with suppress(LookupError):
            attempt(store, operation, late)
        assert found(store, operation).status is Status.IN_PROGRESS
        assert sent == ["claimed", "lost"]
        assert store.complete(claims[0], OTHER)

    @pytest.mark.parametrize("ending", ["raised", "stored"])
    def test_settled_by_hand(self, store: Watched, ending: str, sent: list[str]) -> None:
        """What an operator stored meanwhile, for that same attempt, is not announced as its own."""
        operation = leased()
        payload = (lambda: STORED) if ending == "stored" else None

        def late(execution: ExecutionContext | None) -> object:
            settle_by_hand(store, operation)
            raise LookupError

        attempt(store, operation, late, recover=lambda error: Result("404", payload, failed=True))
        assert found(store, operation).payload == OTHER
        assert sent == ["claimed", "lost"]

    def test_deleted_and_claimed_anew(self, store: Watched, sent: list[str]) -> None:
        """Nor is what was stored by the first attempt of a record that replaced its own."""
        operation = leased()

        def late(execution: ExecutionContext | None) -> object:
            forget(store, operation)
            attempt(store, operation, effect)
            raise LookupError

        with pytest.raises(LookupError):
            attempt(store, operation, late)
        assert effects() == 1
        assert sent == ["claimed", "claimed", "completed", "lost"]

    def test_claim_of_another_operation(self, store: Watched, sent: list[str]) -> None:
        """An operation that the handler executed, and that was lost, is an error like any other."""
        operation, inner = leased(), leased()

        def handler(execution: ExecutionContext) -> None:
            attempt(store, inner, lambda e: forget(store, inner))

        with pytest.raises(ClaimLost):
            attempt(store, operation, handler)
        assert sent == ["claimed", "claimed", "lost", "failed"]
        assert found(store, operation).status is Status.FAILED
        assert isinstance(attempt(store, operation, effect), Executed)


class TestSignals:
    """Each attempt ends in one signal."""

    @pytest.mark.parametrize(("hold", "then"), [(True, Held), (False, Executed)])
    def test_end_of_the_process(
        self, store: Watched, sent: list[str], hold: bool, then: type[Outcome]
    ) -> None:
        """What ends the process leaves the key to the lease, as a crash does, or to an operator."""
        operation = leased(hold=hold)

        def handler(execution: ExecutionContext) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            attempt(store, operation, handler)
        assert sent == ["claimed"]
        assert isinstance(attempt(store, operation, effect), InProgress)
        interrupt(store, operation)
        assert isinstance(attempt(store, operation, effect), then)
        assert effects() == (not hold)

    def test_cancellation_and_hold(self) -> None:
        """The same holds for an async handler that is cancelled."""
        store, operation = WatchedMemory(str(uuid4())), leased(hold=True)

        async def work() -> None:
            reached = asyncio.Event()

            async def endless(execution: ExecutionContext) -> Result:
                reached.set()
                await asyncio.Event().wait()
                raise AssertionError

            task = asyncio.ensure_future(engine.arun(store, operation, endless, engine.reraise))
            await asyncio.wait_for(reached.wait(), PATIENCE)
            task.cancel()
            await asyncio.wait([task], timeout=PATIENCE)
            assert task.cancelled()

        asyncio.run(work())
        assert found(store, operation).status is Status.IN_PROGRESS
        interrupt(store, operation)
        assert isinstance(attempt(store, operation, effect), Held)


@pytest.mark.usefixtures("at_once")
class TestUnreachableStore:
    """A store that cannot be reached for a moment, or at all."""

    @pytest.mark.parametrize(
        "faults",
        [["before"], ["before"] * 5, ["after"], ["before", "after"], ["after", "before", "after"]],
    )
    def test_complete_comes_through(
        self, store: Watched, faults: list[str], sent: list[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        """What was done is stored when the store is back, once, whether a response was lost or not.

        After ``"after"`` it was stored, and nobody was told.
        """
        operation = leased()
        store.faults["complete"] = list(faults)
        assert isinstance(attempt(store, operation, effect), Executed)
        assert store.faults["complete"] == []
        outcome = attempt(store, operation, effect)
        assert isinstance(outcome, Replayed)
        assert outcome.record.payload == STORED
        assert effects() == 1
        assert sent == ["claimed", "completed", "replayed"]
        assert "could not be stored" not in caplog.text

    def test_complete_is_never_possible(
        self, store: Watched, sent: list[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        """The client gets its response all the same, and the log tells what a retry will do."""
        operation = leased()
        store.faults["complete"] = ["before"] * 6
        assert attempt(store, operation, lambda e: "the response") == Executed("the response")
        assert "A retry of" in caplog.text
        assert operation.key in caplog.text
        assert sent == ["claimed"]
        assert found(store, operation).status is Status.IN_PROGRESS
        interrupt(store, operation)
        assert isinstance(attempt(store, operation, effect), Executed)

    def test_complete_is_given_up_with_the_lease(
        self, store: Watched, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """When the lease is over somebody else may be at it: no further try."""
        operation = leased()
        store.faults["complete"] = ["before"] * 6

        def handler(execution: ExecutionContext | None) -> str:
            assert execution is not None
            assert execution._lease is not None
            execution._lease._valid_until = 0
            return "the response"

        assert attempt(store, operation, handler) == Executed("the response")
        assert store.times("complete", operation) == 1

    def test_taken_over_meanwhile(self, store: Watched) -> None:
        """What was stored by somebody else meanwhile is not taken for its own."""
        operation = leased()
        store.faults["complete"] = ["", "before"]

        def late(execution: ExecutionContext | None) -> None:
            assert store.complete(taken_over(store, operation), STORED)

        assert isinstance(attempt(store, operation, late), Replayed)

    @pytest.mark.parametrize("error", [LookupError, None])
    def test_fail(
        self, store: Watched, error: type[Exception] | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A failure that cannot be recorded is logged; the client is told of the failure."""
        operation = leased()
        store.faults["fail"] = ["before"] * 2
        if error:
            with pytest.raises(LookupError):
                attempt(store, operation, _raises_after(effect))
        else:
            response = Result("503", None, error="The response had the status 503.", failed=True)
            assert attempt(store, operation, lambda e: response) == Executed("503")
        assert "could not be recorded" in caplog.text
        assert isinstance(attempt(store, operation, effect), InProgress)
        interrupt(store, operation)
        assert isinstance(attempt(store, operation, effect), Executed)

    def test_refuse(self, store: Watched) -> None:
        """By default nothing is executed while the store cannot be reached."""
        store.faults["acquire"] = ["before"]
        with pytest.raises(StoreUnavailable):
            attempt(store, leased(), effect)
        assert effects() == 0

    def test_too_busy(self, store: Watched) -> None:
        """A store that is too busy to say more is a conflict, not a failure of the store."""
        store.error, store.faults["acquire"] = OperationInProgress, ["before"]
        assert isinstance(attempt(store, leased(), effect), InProgress)
        assert effects() == 0

    def test_whether_a_claim_is_lost_cannot_be_asked(self, store: Watched) -> None:
        """Who is told of a lost claim, and cannot ask whose, fails as ever and frees the key."""
        operation = leased()
        store.faults["extend"] = ["before"]

        def handler(execution: ExecutionContext) -> None:
            raise ClaimLost

        with pytest.raises(ClaimLost):
            attempt(store, operation, handler)
        assert found(store, operation).status is Status.FAILED


def lose_commit(*, done: bool, using: str = "default") -> None:
    """Let the next COMMIT be done, or not, and nobody be told which."""
    of = connections[using]
    commit: Callable[[], None] = of._commit  # type: ignore[attr-defined]

    def unconfirmed() -> None:
        del of._commit  # type: ignore[attr-defined]
        if done:
            commit()
        raise OperationalError("server closed the connection unexpectedly")

    of._commit = unconfirmed  # type: ignore[attr-defined]


def one_by_one() -> WatchedDatabase:
    """A store that leaves COMMIT to Django, where a test can lose it."""
    return WatchedDatabase(str(uuid4()), combine_statements=False)


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.driver
class TestUnconfirmedCommit:
    """Nobody knows whether the attempt was committed: where it is to be held, it is."""

    @pytest.mark.parametrize("within", ["atomic", "step"])
    def test_store(self, within: str, done: bool, sent: list[str]) -> None:
        """A transaction of the store's own: the key is not freed, and a person decides."""
        store, operation = one_by_one(), leased(hold=True)

        def work() -> None:
            effect(None)
            lose_commit(done=done)

        def handler(execution: ExecutionContext) -> None:
            if within == "step":
                execution.step("a", work)
            else:
                with execution.atomic():
                    work()

        with pytest.raises(StoreUnavailable, match="operator"):
            attempt(store, operation, handler)
        assert isinstance(attempt(store, operation, effect), InProgress)
        interrupt(store, operation)
        assert isinstance(attempt(store, operation, effect), Held)
        assert effects() == done
        assert sent == ["claimed", "conflicted", "conflicted"]

    def test_resumed(self, done: bool, sent: list[str]) -> None:
        """Where it is to be resumed the key is free at once, as after any other failure."""
        store, operation = one_by_one(), leased()

        def handler(execution: ExecutionContext) -> None:
            with execution.atomic():
                effect(None)
                lose_commit(done=done)

        with pytest.raises(StoreUnavailable):
            attempt(store, operation, handler)
        assert isinstance(attempt(store, operation, effect), Executed)
        assert effects() == 1 + done
        assert sent == ["claimed", "failed", "claimed", "completed"]

    def test_store_cannot_tell(self, done: bool, sent: list[str]) -> None:
        """Nor is it taken for failed where the store cannot be asked what became of it."""
        store, operation = one_by_one(), leased(hold=True)
        store.faults["get"] = ["before"]

        def handler(execution: ExecutionContext | None) -> None:
            effect(None)
            lose_commit(done=done)

        with pytest.raises(StoreUnavailable):
            attempt(store, operation, handler, together=True)
        assert sent == ["claimed"]
        if not done:
            interrupt(store, operation)
        assert isinstance(attempt(store, operation, effect), Replayed if done else Held)
        assert effects() == done


class TestKnownEnd:
    """What is known not to have been committed is no interruption: its key is free at once."""

    @pytest.mark.parametrize("error", [LookupError, IntegrityError, InterfaceError])
    def test_handler_raises(self, store: Watched, error: type[Exception]) -> None:
        """The handler's own error, whatever it is."""
        operation = leased(hold=True)

        def handler(execution: ExecutionContext | None) -> None:
            raise error

        with pytest.raises(error):
            attempt(store, operation, handler, around=transaction.atomic())
        assert isinstance(attempt(store, operation, effect), Executed)

    @pytest.mark.parametrize("error", [StoreUnavailable, OperationalError])
    def test_not_begun(
        self, store: Watched, error: type[Exception], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A handler that was never begun, because its transaction could not be opened."""
        operation = leased(hold=True)

        @contextmanager
        def closed() -> Iterator[None]:
            raise error
            yield

        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(store, "transaction", closed)
            attempt(store, operation, effect, together=True)
        assert effects() == 0
        assert isinstance(attempt(store, operation, effect), Executed)


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no connection to lose")
@pytest.mark.driver
def test_connection_that_is_lost() -> None:
    """A handler that fails with it leaves the key free at once."""
    store, operation = DatabaseStore("default"), leased()

    def handler(execution: ExecutionContext) -> None:
        cut_connection()
        Effect.objects.count()

    with pytest.raises((DatabaseError, InterfaceError)):
        attempt(store, operation, handler)
    assert found(store, operation).status is Status.FAILED
    assert isinstance(attempt(store, operation, effect), Executed)


def test_hold(store: Watched, sent: list[str]) -> None:
    """A held one waits for an operator, whoever asks."""
    operation = leased(hold=True)
    assert isinstance(store.acquire(operation), Claim)
    interrupt(store, operation)
    for wait in (None, LONG):
        assert isinstance(attempt(store, operation, effect, wait=wait), Held)
    assert effects() == 0
    assert sent == ["conflicted"] * 2


@pytest.mark.driver
class TestOneTransaction:
    """Handler and response in one transaction, after the claim's."""

    store = DatabaseStore("default")

    def test_visible(self, elsewhere: ThreadPoolExecutor) -> None:
        """While the handler runs in it everybody can see the claim."""
        operation, seen = leased(), []

        def handler(execution: ExecutionContext | None) -> None:
            effect(execution)
            seen.append(elsewhere.submit(found, self.store, operation).result(PATIENCE).status)
            seen.append(elsewhere.submit(effects).result(PATIENCE))

        assert isinstance(attempt(self.store, operation, handler, together=True), Executed)
        assert seen == ["in_progress", 0]
        assert isinstance(attempt(self.store, operation, effect), Replayed)
        assert effects() == 1

    def test_late(self, elsewhere: ThreadPoolExecutor) -> None:
        """The whole transaction of a late owner rolls back; it gets the other's response."""
        if connection.vendor == "sqlite":
            pytest.skip("SQLite's transaction keeps everybody else from writing")
        operation = leased()

        def handler(execution: ExecutionContext | None) -> None:
            effect(execution)
            claim = elsewhere.submit(taken_over, self.store, operation).result(PATIENCE)
            assert elsewhere.submit(self.store.complete, claim, STORED).result(PATIENCE)

        assert isinstance(attempt(self.store, operation, handler, together=True), Replayed)
        assert (effects(), found(self.store, operation).attempt) == (0, 2)

    def test_store_fails_at_the_end(self) -> None:
        """When the response cannot be stored all of it rolls back, and a retry runs."""
        store, operation = WatchedDatabase(str(uuid4())), leased()
        store.faults["complete"] = ["before"]
        with pytest.raises(StoreUnavailable):
            attempt(store, operation, effect, together=True)
        assert (effects(), found(store, operation).status) == (0, "failed")
        assert isinstance(attempt(store, operation, effect, together=True), Executed)
        assert effects() == 1

    def test_hook_fails(self, sent: list[str]) -> None:
        """A hook that fails behind the commit leaves it completed: a signal says so, once."""
        operation = leased()

        def handler(execution: ExecutionContext | None) -> None:
            effect(execution)
            transaction.on_commit(_raise)

        with pytest.raises(LookupError):
            attempt(self.store, operation, handler, together=True)
        assert sent == ["claimed", "completed"]
        assert isinstance(attempt(self.store, operation, effect), Replayed)
        assert effects() == 1


def _raise() -> None:
    raise LookupError("boom")
