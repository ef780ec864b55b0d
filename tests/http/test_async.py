"""Async views: under ASGI and WSGI, side by side, cancelled at every point where they wait."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.test import AsyncClient, AsyncRequestFactory, Client, override_settings
from django.urls import path
from django.utils import timezone

from idempotency_django import engine
from idempotency_django.decorators import idempotent
from idempotency_django.engine import Executed, Outcome, Replayed, Result
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim, Operation, Payload, Record, Status
from idempotency_django.testing import PATIENCE, an_operation
from idempotency_django.testing.contract import as_claim
from tests.models import Effect
from tests.support.shared import assert_replays, effects, is_replay, new_key, post, record

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

T = TypeVar("T")
MIDDLEWARE = "idempotency_django.middleware.IdempotencyMiddleware"


class Gate:
    """Where a view waits for the test."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self.cancelled = False

    async def passed(self) -> None:
        """Wait until the test opens it."""
        self.reached.set()
        try:
            await asyncio.wait_for(self.opened.wait(), PATIENCE)
        except asyncio.CancelledError:
            self.cancelled = True
            raise


gates: dict[str, Gate] = {}
executions: list[ExecutionContext | None] = []


async def create(request: HttpRequest) -> HttpResponseBase:
    reference = json.loads(request.body)["reference"]
    executions.append(request.idempotency)
    await Effect.objects.acreate(reference=reference)
    if reference in gates:
        await gates[reference].passed()
    return JsonResponse({"reference": reference}, status=201, headers={"Location": "/e/1"})


@idempotent
async def function(request: HttpRequest) -> HttpResponseBase:
    return await create(request)


@idempotent(on_conflict="wait")
async def waiting(request: HttpRequest) -> HttpResponseBase:
    return await create(request)


@idempotent(mode="transactional")
async def transactional(request: HttpRequest) -> HttpResponseBase:
    return await create(request)


async def unmarked(request: HttpRequest) -> HttpResponseBase:
    return await create(request)


urlpatterns = [
    path("function/", function),
    path("waiting/", waiting),
    path("transactional/", transactional),
    path("unmarked/", unmarked),
]


@pytest.fixture(autouse=True)
def _setup(settings: Any) -> Iterator[None]:
    settings.MIDDLEWARE = [*django_settings.MIDDLEWARE, MIDDLEWARE]
    executions.clear()
    yield
    gates.clear()


def in_loop(work: Callable[[], Awaitable[T]]) -> T:
    """Run it in a loop of its own, and close what the thread for its sync code opened."""

    async def run() -> T:
        try:
            return await asyncio.wait_for(work(), PATIENCE * 2)
        finally:
            await sync_to_async(connections.close_all)()

    return asyncio.run(run())


async def end_lease(key: str) -> None:
    """Let the lease of the key be over, as after the time that nobody renewed it."""
    rows = IdempotencyKey.objects.filter(key=key, status="in_progress")
    await rows.aupdate(lease_expires_at=timezone.now() - timedelta(hours=1))


class SyncClientLike:
    """Sends one request after another through the ASGI handler, each in a loop of its own."""

    def __init__(self) -> None:
        self.client = AsyncClient()

    def post(self, *args: Any, **kwargs: Any) -> HttpResponse:
        return in_loop(partial(self.client.post, *args, **kwargs))


@pytest.fixture(params=[SyncClientLike, Client], ids=["asgi", "wsgi"])
def either(request: pytest.FixtureRequest) -> Any:
    """A client through the ASGI handler, and one through the WSGI handler."""
    return request.param()


class TestProtected:
    """What every protected async view does, wherever it runs."""

    @pytest.mark.parametrize("url", ["/function/", "/unmarked/"])
    def test_replay(self, either: Any, url: str) -> None:
        """One effect; the retry gets the same status, headers and bytes."""
        key = new_key()
        first = post(either, url, key)
        assert first.status_code == 201
        assert_replays(first, post(either, url, key))
        assert effects() == 1
        assert (record(key).status, record(key).attempt) == ("completed", 1)
        [execution] = executions
        assert execution is not None
        assert execution.operation.lease == timedelta(seconds=30)
        assert (execution.key, execution.scope) == (key, record(key).scope)

    def test_transactional_mode(self, either: Any) -> None:
        """``mode="transactional"`` on an async view is refused, and says why."""
        with pytest.raises(
            ImproperlyConfigured, match="async view, for which Django has no transactions"
        ):
            post(either, "/transactional/", new_key())
        assert effects() == 0


def test_wait() -> None:
    """With ``on_conflict="wait"`` the duplicates get the first response when it is there."""
    key = new_key()

    async def work() -> list[HttpResponse]:
        gate = gates["a"] = Gate()
        client = AsyncClient()
        first = asyncio.ensure_future(post(client, "/waiting/", key))
        await asyncio.wait_for(gate.reached.wait(), PATIENCE)
        others = [asyncio.ensure_future(post(client, "/waiting/", key)) for _ in range(5)]
        # The loop is free while they wait: this one gets a response.
        assert (await post(client, "/waiting/", new_key(), "b")).status_code == 201
        assert not any(other.done() for other in others)
        gate.opened.set()
        return await asyncio.gather(first, *others)

    first, *others = in_loop(work)
    for other in others:
        assert_replays(first, other)
    assert effects() == 1


class CancelledAt:
    """Awaits a coroutine, and cancels the task each time it waits at one of these points."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], *points: int) -> None:
        self.coroutine = coroutine
        self.points = points
        self.seen = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        going_on = self.coroutine.__await__()
        advance: Callable[[], Any] = partial(next, going_on)
        while True:
            try:
                waited_for = advance()
            except StopIteration as end:
                return end.value
            self.seen += 1
            if self.seen in self.points:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            try:
                value = yield waited_for
                advance = partial(going_on.send, value)
            except BaseException as error:  # noqa: BLE001
                advance = partial(going_on.throw, error)


async def cancelled_at(coroutine: Coroutine[Any, Any, Any], *points: int) -> bool:
    """Whether the coroutine has as many points to wait at; asserts that it ended then."""
    waiting = CancelledAt(coroutine, *points)
    task = asyncio.ensure_future(_awaiting(waiting))
    with suppress(Exception):
        await asyncio.wait([task], timeout=PATIENCE)
    assert task.done()
    reached = waiting.seen >= points[0]
    assert task.cancelled() == reached, f"at {points} of {waiting.seen}: {task!r}"
    return reached


async def _awaiting(waiting: CancelledAt) -> Any:
    return await waiting


async def stepping(request: HttpRequest) -> HttpResponseBase:
    """A view of two steps."""

    async def charge() -> dict[str, str]:
        await asyncio.sleep(0)
        return {"id": request.idempotency.derive_key("charge")}

    charged = await request.idempotency.astep("charge", charge)
    booked = await request.idempotency.astep(
        "book", lambda: Effect.objects.create(reference="booked").pk
    )
    await Effect.objects.acreate(reference="a")
    return JsonResponse({"charged": charged, "booked": booked}, status=201)


async def failing_once(request: HttpRequest) -> HttpResponseBase:
    """A view that raises at its first attempt."""
    await Effect.objects.acreate(reference="a")
    if request.idempotency.attempt == 1:
        raise LookupError("boom")
    return HttpResponse(status=201)


CANCELLED_VIEWS = {
    "responses": idempotent(create),
    "steps": idempotent(stepping),
    "raises": idempotent(failing_once),
}


def a_request(key: str, reference: str = "a") -> HttpRequest:
    return AsyncRequestFactory().post(
        "/",
        json.dumps({"reference": reference}),
        content_type="application/json",
        headers={"Idempotency-Key": key},
    )


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("view", CANCELLED_VIEWS.values(), ids=CANCELLED_VIEWS)
def test_cancelled_anywhere(view: Callable[[HttpRequest], Any], times: int) -> None:
    """A request that is cancelled at any of the points where it waits leaves the key completed or
    retryable, at the latest after the lease.
    """

    async def points() -> int:
        point = 0
        while True:
            point += 1
            key = new_key()
            where = range(point, point + times)
            reached = await cancelled_at(view(a_request(key)), *where)
            if not reached:
                return point - 1
            found = await IdempotencyKey.objects.filter(key=key).afirst()
            status = found.status if found else None
            await end_lease(key)
            with suppress(LookupError):
                again = await view(a_request(key))
                assert again.status_code == 201
                assert is_replay(again) == (status == "completed")

    assert in_loop(points) >= 4  # the question, the claim, the view and its completion


class Flaky(MemoryStore):
    """A store that can be told to wait for the test at each question."""

    def __init__(self) -> None:
        super().__init__("default")
        self.asked: list[str] = []
        self.blocked_at = ""
        self.reached, self.opened = threading.Event(), threading.Event()

    async def blocked(self) -> None:
        """Wait until it is asked what it is to wait at."""
        assert await asyncio.to_thread(self.reached.wait, PATIENCE)

    def _wait(self, question: str) -> None:
        self.asked.append(question)
        if question == self.blocked_at:
            self.reached.set()
            assert self.opened.wait(PATIENCE)

    def acquire(self, operation: Operation) -> Claim | Record:
        self._wait("acquire")
        found = super().acquire(operation)
        self._wait("acquired")
        return found

    def complete(self, claim: Claim, payload: Payload, *, last: bool = False) -> bool:
        self._wait("complete")
        completed = super().complete(claim, payload)
        self._wait("completed")
        return completed

    def fail(self, claim: Claim, error: str, *, pinned: bool = False, held: bool = False) -> bool:
        self._wait("fail")
        failed = super().fail(claim, error, pinned=pinned, held=held)
        self._wait("failed")
        return failed


STORED = Payload(201, (), b"done")
LEASE = timedelta(seconds=30)


async def response(execution: ExecutionContext | None) -> Result:
    executions.append(execution)
    await asyncio.sleep(0)
    return Result("done", STORED)


async def refuse(execution: ExecutionContext | None) -> Result:
    executions.append(execution)
    await asyncio.sleep(0)
    raise LookupError("boom")


def arun(
    store: MemoryStore,
    operation: Operation,
    execute: Callable[[ExecutionContext | None], Awaitable[Result]] = response,
    **changes: Any,
) -> Coroutine[Any, Any, Outcome]:
    return engine.arun(store, replace(operation, **changes), execute, engine.reraise)


def test_no_lease() -> None:
    """A coroutine function needs a claim with a lease: no transaction can span it."""

    async def work() -> None:
        with pytest.raises(ValueError, match="has no lease"):
            await arun(Flaky(), an_operation())

    in_loop(work)
    assert executions == []


class TestCancelledWhileAsking:
    """A cancellation while the store is being asked something: the question is finished first."""

    @pytest.mark.parametrize("times", [1, 2, 5])
    @pytest.mark.parametrize(
        ("question", "execute", "status", "executed"),
        [
            ("acquire", response, Status.FAILED, 0),
            ("acquired", response, Status.FAILED, 0),
            ("complete", response, Status.COMPLETED, 1),
            ("completed", response, Status.COMPLETED, 1),
            ("fail", refuse, Status.FAILED, 1),
            ("failed", refuse, Status.FAILED, 1),
        ],
    )
    def test_question(
        self, question: str, execute: Any, status: Status, executed: int, times: int
    ) -> None:
        """Nothing is begun after it, and what was done already is completed, also for a hook."""
        seen: list[str] = []

        @contextmanager
        def recorder(execution: Any) -> Iterator[None]:
            try:
                yield
            finally:
                seen.append(execution.outcome)

        async def work() -> None:
            store, operation = Flaky(), an_operation(lease=LEASE)
            store.blocked_at = question
            task = asyncio.ensure_future(arun(store, operation, execute))
            await store.blocked()
            for _ in range(times):
                task.cancel()
                await asyncio.sleep(0)
            assert not task.done()
            store.opened.set()
            await asyncio.wait([task], timeout=PATIENCE)
            assert task.cancelled()
            found = store.get(operation.key, operation.scope)
            assert found is not None
            assert found.status is status
            assert len(executions) == executed
            assert (seen == ["executed"]) is (status is Status.COMPLETED), seen
            store.blocked_at = ""
            again = await arun(store, operation)
            assert isinstance(again, Replayed if status is Status.COMPLETED else Executed)

        with override_settings(IDEMPOTENCY={"AROUND_EXECUTION": [recorder]}):
            in_loop(work)

    def test_while_it_waits_for_another(self) -> None:
        """Who waits for somebody else's execution leaves at once, and frees nothing of it."""

        async def work() -> None:
            store, operation = Flaky(), an_operation(lease=LEASE)
            held = as_claim(store.acquire(operation))
            store.asked.clear()
            patience = timedelta(seconds=PATIENCE)
            waiting = arun(store, operation, wait=patience)
            task = asyncio.ensure_future(waiting)
            while len(store.asked) < 3:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task], timeout=PATIENCE)
            assert task.cancelled()
            assert store.complete(held, STORED)
            assert executions == []

        in_loop(work)
