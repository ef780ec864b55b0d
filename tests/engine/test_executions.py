"""``request.idempotency``: derived keys, fenced transactions, recovery points; on every store."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.admin.models import ADDITION, LogEntry
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, connections, transaction

from idempotency_django.engine import Executed, InProgress, Replayed
from idempotency_django.engine.context import LONGEST_NAME, ExecutionContext
from idempotency_django.errors import ClaimLost, StepsChanged
from idempotency_django.stores import Store
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim, Operation, Record, Status, Step
from idempotency_django.testing import PATIENCE
from idempotency_django.testing.contract import as_claim
from tests.models import Effect
from tests.settings import ALIASES
from tests.support.attempts import STORED, aattempt, attempt, found, interrupt, leased, taken_over
from tests.support.shared import effects

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
]

Handler = Callable[[ExecutionContext], object]


@pytest.fixture(params=list(ALIASES))
def database(request: pytest.FixtureRequest) -> DatabaseStore:
    """A store on each database."""
    return DatabaseStore("default", using=ALIASES[request.param])


def fails(handler: Handler) -> Handler:
    """The handler, which fails at its end."""

    def failing(execution: ExecutionContext) -> None:
        handler(execution)
        raise InterruptedError

    return failing


def failed_after(store: Store, operation: Operation, handler: Handler) -> None:
    """An attempt that runs the handler and fails then."""
    with pytest.raises(InterruptedError):
        attempt(store, operation, fails(handler))


def stored(store: Store, operation: Operation) -> list[Step]:
    """The steps that are stored, read by an owner."""
    failed_after(store, operation, lambda execution: None)
    claim = as_claim(store.acquire(operation))
    steps = list(store.steps(claim))
    assert store.fail(claim, "only looked")
    return steps


def effect(using: str | None, reference: str = "a") -> int:
    return Effect.objects.using(using or "default").create(reference=reference).pk


def dangling(using: str) -> None:
    """Do what PostgreSQL and SQLite refuse at COMMIT only."""
    effect(using)
    LogEntry.objects.using(using).create(user_id=10**6, action_flag=ADDITION)


def test_no_secret_in_its_repr(store: Store) -> None:
    """The owner's token is in no repr that a log may show."""

    def handler(execution: ExecutionContext) -> None:
        assert execution._claim.token not in repr(execution)

    attempt(store, leased(), handler)


class TestDerivedKeys:
    """Keys for somebody else's service."""

    def execution(self, **changes: object) -> ExecutionContext:
        return ExecutionContext(MemoryStore("default"), Claim(leased(**changes), 1, "t"), None)

    def test_pinned(self) -> None:
        """The key of an operation stays what it is, in every version of this package."""
        execution = self.execution(
            key="8e03978e-40d5-43e8-bc93-6894a57f9324", fingerprint="5f2c0b1e9a7d4c3b8e6f0a1d"
        )
        assert execution.derive_key("charge") == "bbbb1554-82bf-5b3a-bb81-4d7d28b50175"

    def test_stable_over_attempts(self, store: Store) -> None:
        """Every attempt derives the same."""
        operation, derived = leased(), []

        def handler(execution: ExecutionContext) -> None:
            derived.append(execution.derive_key("charge"))

        failed_after(store, operation, handler)
        failed_after(store, operation, handler)
        attempt(store, operation, handler)
        assert len(derived) == 3
        assert len(set(derived)) == 1

    def test_distinct(self) -> None:
        """Another name, key or scope makes another, also where the texts joined are the same."""
        made = [
            self.execution(key=key, scope=scope).derive_key(name)
            for key, scope, name in [
                ("k", "s", "n"),
                ("k", "s", "N"),
                ("s", "k", "n"),
                ("kn", "s", ""),
                ("k1:n", "s", "n"),
            ]
        ]
        assert len(set(made)) == len(made)


class TestSteps:
    """A step runs once to a stored result."""

    def test_once(self, store: Store) -> None:
        """What has run in a failed attempt does not run again; the next goes on behind it."""
        operation, calls = leased(), []

        def step(name: str, result: object) -> object:
            calls.append(name)
            if name == "credit" and len(calls) == 3:
                raise ConnectionError
            return result

        def handler(execution: ExecutionContext) -> list[object]:
            return [
                execution.step("debit", step, "debit", {"id": 1}),
                execution.step("ledger", step, name="ledger", result=[2.5, None, "ü"]),
                execution.step("credit", step, "credit", True),
            ]

        with pytest.raises(ConnectionError):
            attempt(store, operation, handler)
        outcome = attempt(store, operation, handler)
        assert outcome == Executed([{"id": 1}, [2.5, None, "ü"], True])
        assert calls == ["debit", "ledger", "credit", "credit"]
        assert isinstance(attempt(store, operation, handler), Replayed)
        assert len(calls) == 4

    def test_result_reads_alike(self, store: Store) -> None:
        """The result is what JSON makes of it, on the first attempt as on the next."""
        for result, read in [
            ((1, (2, "x")), [1, [2, "x"]]),
            ({1: (2,)}, {"1": [2]}),
            (None, None),
            ({}, {}),
            ("\x00\ud800\N{SNOWMAN}", "\x00\ud800\N{SNOWMAN}"),
            (10**30, 10**30),
        ]:
            operation, results = leased(), []

            def handler(execution: ExecutionContext) -> None:
                results.append(execution.step("a", lambda: result))  # noqa: B023

            failed_after(store, operation, handler)
            attempt(store, operation, handler)
            assert results == [read, read]
            assert [type(r) for r in results] == [type(read)] * 2

    def test_result_is_not_json(self, store: Store) -> None:
        """What is no JSON is a clear error; nothing of the step is kept."""
        for result in (object(), {1, 2}, b"bytes", math.nan, math.inf, {(1, 2): 3}):
            operation = leased()

            def work() -> object:
                effect(store.using)
                return result  # noqa: B023

            with pytest.raises(TypeError, match="'a' returned a value that is not JSON"):
                attempt(store, operation, lambda e: e.step("a", work))
            if store.supports_transactions:
                assert effects(using=store.using) == 0
            assert stored(store, operation) == []

    def test_commits_with_its_work(self, database: DatabaseStore) -> None:
        """What a step writes and its result are there together, or neither is."""
        operation, using = leased(), database.using

        def work(reference: str) -> int:
            assert connections[using].in_atomic_block
            key = effect(using, reference)
            if reference == "bad":
                raise LookupError
            return key

        def handler(execution: ExecutionContext) -> None:
            assert not connections[using].in_atomic_block
            execution.step("good", work, "good")
            assert not connections[using].in_atomic_block
            execution.step("bad", work, "bad")

        for _ in range(2):
            with pytest.raises(LookupError):
                attempt(database, operation, handler)
        assert (effects("good", using), effects("bad", using)) == (1, 0)
        assert [step.name for step in stored(database, operation)] == ["good"]

    def test_refused_at_commit(self, database: DatabaseStore) -> None:
        """A step that the database refuses at COMMIT is not done: it can be called again."""
        operation, calls = leased(), []

        def handler(execution: ExecutionContext) -> object:
            with pytest.raises(IntegrityError):
                execution.step("grant", dangling, database.using)
            return execution.step("grant", _noted, calls, "granted")

        failed_after(database, operation, handler)
        assert attempt(database, operation, lambda e: e.step("grant", list)) == Executed("granted")
        assert calls == ["granted"]
        assert effects(using=database.using) == 0

    def test_hook_that_raises(self, database: DatabaseStore) -> None:
        """A step whose hook fails behind the commit is done, and is not called a second time."""
        operation, calls = leased(), []

        def broken() -> None:
            raise ConnectionError

        def work() -> str:
            effect(database.using)
            transaction.on_commit(broken, using=database.using)
            return _noted(calls, "worked")

        def handler(execution: ExecutionContext) -> None:
            with pytest.raises(ConnectionError):
                execution.step("a", work)
            with pytest.raises(ValueError, match="two steps with the name 'a'"):
                execution.step("a", work)

        failed_after(database, operation, handler)
        attempt(database, operation, lambda e: e.step("a", work))
        assert calls == ["worked"]
        assert effects(using=database.using) == 1


class TestChangedSteps:
    """A deploy between two attempts that changed the steps; they are found by their names."""

    @staticmethod
    def steps(names: str, calls: list[str]) -> Handler:
        """A handler with these steps, which note that they are called."""

        def handler(execution: ExecutionContext) -> None:
            for name in names.split():
                execution.step(name, calls.append, name)

        return handler

    @pytest.mark.parametrize(
        ("after", "named"),
        [
            ("a x c", "the step 'b'"),
            ("c b", "the step 'a'"),
            ("", "the steps 'a', 'b', 'c'"),
        ],
    )
    def test_not_called(self, store: Store, after: str, named: str) -> None:
        """Renamed, removed or skipped: what a step did is not forgotten, and it is named."""
        operation, calls = leased(), []
        failed_after(store, operation, self.steps("a b c", calls))
        calls.clear()
        for _ in range(2):
            with pytest.raises(StepsChanged, match=f"ended without {named} of an earlier attempt"):
                attempt(store, operation, self.steps(after, calls))
            assert found(store, operation).status is Status.FAILED
        assert calls == [name for name in after.split() if name not in "abc"]
        # An operator who deploys the old steps again may go on, unless there are new ones.
        if not calls:
            outcome = attempt(store, operation, self.steps("a b c", calls))
            assert isinstance(outcome, Executed)
        assert calls == [name for name in after.split() if name not in "abc"]

    @pytest.mark.parametrize("after", ["b a", "b x a x2"])
    def test_moved_or_added(self, store: Store, after: str) -> None:
        """The order of steps is no matter, and a new step may stand anywhere."""
        operation, calls = leased(), []
        failed_after(store, operation, self.steps("a b", calls))
        calls.clear()
        assert isinstance(attempt(store, operation, self.steps(after, calls)), Executed)
        assert calls == [name for name in after.split() if name not in "ab"]

    def test_two_steps_of_one_name(self, store: Store) -> None:
        """Two steps of one name cannot be told apart: the second is refused before it runs."""
        operation, calls = leased(), []

        def handler(execution: ExecutionContext) -> None:
            execution.step("a", calls.append, 1)
            execution.step("a", calls.append, 2)

        for _ in range(2):
            with pytest.raises(ValueError, match="two steps with the name 'a'"):
                attempt(store, operation, handler)
        assert calls == [1]

    def test_impossible_names(self, store: Store) -> None:
        """A name is a text of 1-100 characters."""
        names: list[Any] = ["", "x" * (LONGEST_NAME + 1), None, 5, ["a"]]
        for name in names:
            with pytest.raises(ValueError, match="it must have 1-100 characters"):
                attempt(store, leased(), lambda e: e.step(name, lambda: 1))  # noqa: B023


def test_one_name_in_two_threads() -> None:
    """Of two threads that call one step at once, the second is refused before it runs."""
    done: list[str] = []
    begun, refused = Event(), Event()

    def wait() -> None:
        done.append("a")
        begun.set()
        assert refused.wait(PATIENCE)

    def handler(execution: ExecutionContext) -> None:
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(_in_thread, execution.step, "a", wait)
            assert begun.wait(PATIENCE)
            with pytest.raises(ValueError, match="two steps with the name 'a'"):
                execution.step("a", wait)
            refused.set()
            first.result(PATIENCE)

    assert isinstance(attempt(DatabaseStore("default"), leased(), handler), Executed)
    assert done == ["a"]


def _in_thread(function: Any, *args: Any) -> object:
    try:
        return function(*args)
    finally:
        connections.close_all()


class NoSteps(MemoryStore):
    """A store that doesn't support steps."""

    supports_steps = False


class TestRefusals:
    """Where a step cannot keep its promise it is refused, and its function does not run."""

    def test_nested(self, store: Store) -> None:
        """A step within a step would commit with it."""
        operation = leased()

        def handler(execution: ExecutionContext) -> None:
            execution.step("outer", lambda: execution.step("inner", lambda: pytest.fail("it ran")))

        with pytest.raises(
            ImproperlyConfigured, match="'inner' was started within the step 'outer'"
        ):
            attempt(store, operation, handler)
        assert stored(store, operation) == []

    def test_store_without_steps(self) -> None:
        """A store that doesn't support steps says which one does."""
        with pytest.raises(
            ImproperlyConfigured, match=r"NoSteps.* doesn't support steps.*DatabaseStore"
        ):
            attempt(
                NoSteps("default"), leased(), lambda e: e.step("a", lambda: pytest.fail("it ran"))
            )

    def test_transactional_mode(self, database: DatabaseStore) -> None:
        """In the transactional mode a step would be rolled back with everything."""
        with pytest.raises(ImproperlyConfigured, match="mode='leased'"):
            attempt(
                database, leased(lease=None), lambda e: e.step("a", lambda: pytest.fail("it ran"))
            )

    def test_within_a_transaction(self, database: DatabaseStore) -> None:
        """A transaction around the step is refused: its result could be rolled back."""

        def handler(execution: ExecutionContext) -> None:
            with transaction.atomic(using=database.using):
                execution.step("a", lambda: pytest.fail("it ran"))

        with pytest.raises(ImproperlyConfigured, match="The step 'a' must commit on its own"):
            attempt(database, leased(), handler)


class TestLateOwner:
    """An owner whose operation was taken over while it worked."""

    def test_step_is_rolled_back(self, store: Store) -> None:
        """A step during which the claim is lost is not stored, nor what it wrote."""
        operation = leased()
        successors: list[Claim] = []

        def handler(execution: ExecutionContext) -> None:
            successors.append(taken_over(store, operation))
            execution.step("a", effect, store.using)
            pytest.fail("went on")

        assert isinstance(attempt(store, operation, handler), InProgress)
        assert store.steps(successors[0]) in ([], ())
        if store.supports_transactions:
            assert effects(using=store.using) == 0
        assert store.complete(successors[0], STORED)

    def test_lease_over_without_a_successor(self, store: Store) -> None:
        """Where nobody has taken it over it renews its lease and goes on."""
        operation = leased()

        def handler(execution: ExecutionContext) -> object:
            interrupt(store, operation)
            execution._lease._valid_until = 0  # type: ignore[union-attr]
            result = execution.step("a", lambda: 1)
            assert isinstance(store.acquire(operation), Record)  # it is the owner's again
            return result

        assert attempt(store, operation, handler) == Executed(1)


class TestAtomic:
    """``atomic()``, where all is well."""

    @pytest.mark.parametrize("outer", ["atomic", "transaction"])
    def test_within_a_transaction(self, database: DatabaseStore, outer: str) -> None:
        """It is refused: its fence would prevent renewals until that one ends."""

        def handler(execution: ExecutionContext) -> None:
            around = transaction.atomic(using=database.using)
            with execution.atomic() if outer == "atomic" else around, execution.atomic():
                pytest.fail("it was entered")

        with pytest.raises(ImproperlyConfigured, match=r"atomic\(\) of .* must commit on its own"):
            attempt(database, leased(), handler)

    def test_transactional_mode(self, database: DatabaseStore) -> None:
        """In the transactional mode it is a part of the transaction that is there."""
        using, operation = database.using, leased(lease=None)

        def handler(execution: ExecutionContext) -> None:
            with execution.atomic():
                effect(using)
            raise LookupError

        with pytest.raises(LookupError):
            attempt(database, operation, handler)
        assert effects(using=using) == 0

    def test_store_without_transactions(self) -> None:
        """A store that cannot fence says so."""

        def handler(execution: ExecutionContext) -> None:
            with execution.atomic():
                pytest.fail("it was entered")

        with pytest.raises(ImproperlyConfigured, match=r"has no transactions.*DatabaseStore"):
            attempt(MemoryStore("default"), leased(), handler)


class TestAsync:
    """``astep``, for handlers that are async."""

    def test_coroutine_and_plain_functions(self, store: Store) -> None:
        """Both kinds run once to a stored result."""
        operation, calls = leased(), []

        async def remote(number: int, *, by: int) -> tuple[int, int]:
            await asyncio.sleep(0)
            calls.append("remote")
            return number, by

        def local(reference: str) -> bool:
            calls.append("local")
            effect(store.using, reference)
            if not store.supports_transactions:
                return True
            return bool(connections[store.using].in_atomic_block)

        async def handler(execution: ExecutionContext) -> list[object]:
            return [
                await execution.astep("remote", remote, 1, by=2),
                await execution.astep("partial", partial(remote, 3), by=4),
                await execution.astep("local", local, "a"),
            ]

        async def failing(execution: ExecutionContext) -> None:
            await handler(execution)
            raise InterruptedError

        async def work() -> None:
            with pytest.raises(InterruptedError):
                await aattempt(store, operation, failing)
            assert calls == ["remote", "remote", "local"]
            outcome = await aattempt(store, operation, handler)
            assert outcome == Executed([[1, 2], [3, 4], True])
            assert len(calls) == 3

        async_to_sync(work)()
        assert effects(using=store.using) == 1

    def test_late_owner(self, store: Store) -> None:
        """A late owner stores no step; one that knows it is late does not begin it."""
        operation, calls = leased(), []

        async def handler(execution: ExecutionContext) -> None:
            await sync_to_async(taken_over)(store, operation)

            async def remote() -> None:
                calls.append("remote")

            with pytest.raises(ClaimLost):
                await execution.astep("a", remote)
            execution._lease._valid_until = 0  # type: ignore[union-attr]
            with pytest.raises(ClaimLost):
                await execution.astep("b", remote)
            with pytest.raises(ClaimLost):
                await execution.astep("c", _noted, calls, "local")

        outcome = async_to_sync(aattempt)(store, operation, handler)
        assert isinstance(outcome, InProgress)
        assert calls == ["remote"]


def _noted(calls: list[str], name: str) -> str:
    calls.append(name)
    return name
