"""The context managers of ``AROUND_EXECUTION``: once around each execution, of every kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import PermissionDenied
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.test import Client, override_settings
from django.urls import path

from idempotency_django import engine
from idempotency_django.decorators import idempotent
from idempotency_django.engine import Result
from idempotency_django.engine.functions import aidempotent_call, idempotent_call
from idempotency_django.engine.running import ObservedExecution
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import Operation, Payload, Record
from idempotency_django.testing import an_operation
from tests.models import Effect
from tests.support.shared import LONG_AGO, effects, new_key, post
from tests.support.views import acreate, create

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

Seen = list[tuple[str, type[BaseException] | None]]

SPAN: ContextVar[str] = ContextVar("span", default="")
"""Stands for the current span of a tracer."""

seen: Seen = []
"""Outcome and type of the error, of each execution that a hook was around."""
operations: list[Operation] = []
spans: list[str] = []
"""The spans that handlers found themselves in."""


@contextmanager
def recorder(execution: ObservedExecution) -> Iterator[None]:
    """A hook that records what it sees, and makes a span the current one."""
    assert execution.outcome == "failed"
    operations.append(execution.operation)
    token = SPAN.set(execution.operation.key)
    error = None
    try:
        yield
    except BaseException as raised:
        error = type(raised)
        raise
    finally:
        SPAN.reset(token)
        seen.append((execution.outcome, error))


@pytest.fixture(autouse=True)
def _hook() -> Iterator[None]:
    for each in (seen, operations, spans):
        each.clear()
    with override_settings(IDEMPOTENCY={"AROUND_EXECUTION": [recorder]}):
        yield
    assert SPAN.get() == ""


def effect(reference: str = "a") -> int:
    spans.append(SPAN.get())
    return int(Effect.objects.create(reference=reference).pk)


def view(request: HttpRequest) -> HttpResponse:
    spans.append(SPAN.get())
    return create(request)


async def aview(request: HttpRequest) -> HttpResponse:
    spans.append(SPAN.get())
    return await acreate(request)


urlpatterns = [
    path("view/", idempotent(view)),
    path("leased/", idempotent(mode="leased")(view)),
    path("async/", idempotent(aview)),
]


class TestRequests:
    """Every kind of execution."""

    @pytest.fixture(autouse=True)
    def _responses(self, client: Client) -> None:
        client.raise_request_exception = False

    @pytest.mark.parametrize("url", ["/view/", "/leased/", "/async/"])
    def test_each_is_seen(self, client: Client, url: str) -> None:
        """A failure, the next request, its replay and another one are one execution each."""
        key = new_key()
        post(client, url, new_key(), "error")
        for reference in ("a", "a", "b"):
            post(client, url, key, reference)
        assert seen == [
            ("failed", LookupError),
            ("executed", None),
            ("replayed", None),
            ("mismatched", None),
        ]
        assert spans[1:] == [key]
        operations.pop(0)
        assert {each.key for each in operations} == {key}
        assert (operations[0].method, operations[0].path) == ("POST", url)
        assert operations[0].name == f"POST {url}"

    @pytest.mark.parametrize("url", ["/view/", "/leased/"])
    def test_left_after_the_commit(self, client: Client, url: str) -> None:
        """When a hook is left, no transaction is open, and what the outcome says is committed."""
        open_ones = []

        @contextmanager
        def asks(execution: ObservedExecution) -> Iterator[None]:
            try:
                yield
            finally:
                open_ones.append((connection.in_atomic_block, Effect.objects.count()))

        with override_settings(IDEMPOTENCY={"AROUND_EXECUTION": [asks]}):
            post(client, url, key := new_key())
            post(client, url, key)
            post(client, url, new_key(), "error")
        assert open_ones == [(False, 1), (False, 1), (False, effects() + effects("error"))]

    @pytest.mark.parametrize("url", ["/view/", "/leased/"])
    def test_responses_that_are_not_kept(self, client: Client, url: str) -> None:
        """A response of 503 is a failure without an error; one that is not kept frees the key."""
        for reference in ("503", "409"):
            post(client, url, new_key(), reference)
        assert seen == [("failed", None), ("released", None)]


def call(fn: Callable[..., Any] = lambda execution: effect(), **options: Any) -> Any:
    return idempotent_call(fn, key="k-1", scope="books", name="book", **options)


def test_coroutine_functions() -> None:
    """The same for coroutine functions: the hook's context is the handler's."""

    async def fn(execution: Any) -> str:
        await asyncio.sleep(0)
        spans.append(SPAN.get())
        return await sync_to_async(SPAN.get)()

    async def all_of_them() -> list[Any]:
        options: Any = {"key": "k-1", "scope": "books", "name": "book"}

        with pytest.raises(asyncio.CancelledError):
            await aidempotent_call(cancelled, **options)
        await IdempotencyKey.objects.filter(key="k-1").aupdate(lease_expires_at=LONG_AGO)
        return [await aidempotent_call(fn, **options) for _ in range(2)]

    async def cancelled(execution: Any) -> None:
        raise asyncio.CancelledError

    assert async_to_sync(all_of_them)() == ["k-1"] * 2
    assert seen == [
        ("failed", asyncio.CancelledError),
        ("executed", None),
        ("replayed", None),
    ]
    assert spans == ["k-1"]


def test_in_progress() -> None:
    """A duplicate that comes while the first one is executed is a conflict."""
    operation, store = an_operation(lease=timedelta(minutes=1)), DatabaseStore("default")
    store.acquire(operation)
    engine.run(store, operation, executing, engine.reraise)
    assert seen == [("in_progress", None)]


def test_refused_replay() -> None:
    """A replay that is not allowed has failed: it was neither executed nor replayed."""
    operation, store = an_operation(), DatabaseStore("default")

    def admit(record: Record) -> None:
        raise PermissionDenied

    engine.run(store, operation, executing, engine.reraise)
    with pytest.raises(PermissionDenied):
        engine.run(store, operation, executing, engine.reraise, admit=admit)
    assert seen == [("executed", None), ("failed", PermissionDenied)]


def executing(execution: Any) -> Result:
    effect()
    return Result(None, Payload(200, (), b"{}"))


@pytest.mark.parametrize("fails_first", [True, False])
def test_failing(fails_first: bool) -> None:
    """An error of a context manager is the caller's: before the claim, or after the commit."""

    @contextmanager
    def failing(execution: ObservedExecution) -> Iterator[None]:
        if fails_first:
            raise RuntimeError
        yield
        raise RuntimeError

    with (
        override_settings(IDEMPOTENCY={"AROUND_EXECUTION": [recorder, failing]}),
        pytest.raises(RuntimeError),
    ):
        call()
    assert seen == [("failed" if fails_first else "executed", RuntimeError)]
    assert call()
    assert effects() == 1


@contextmanager
def swallowing(execution: ObservedExecution) -> Iterator[None]:
    """A hook that keeps an error to itself, as contextlib.suppress() does."""
    with suppress(LookupError):
        yield


@pytest.mark.parametrize("url", ["/view/", "/leased/"])
def test_hook_that_swallows_the_error(client: Client, url: str) -> None:
    """There is no response without the view's error, so it is raised all the same."""
    with (
        override_settings(IDEMPOTENCY={"AROUND_EXECUTION": [swallowing]}),
        pytest.raises(LookupError, match="boom"),
    ):
        post(client, url, new_key(), "error")
