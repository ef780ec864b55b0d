"""Which operation has caused which: each record names its parent."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from idempotency_django.engine.context import ExecutionContext, current_execution
from idempotency_django.engine.functions import aidempotent_call, idempotent_call
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.stores.records import reference, referred
from tests.support.shared import new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

LEASED = Policy(mode="leased")


def call(key: str, fn: Any, policy: Policy | None = None) -> Any:
    return idempotent_call(fn, key=key, scope="calls", policy=policy)


def nothing(execution: ExecutionContext) -> None:
    assert current_execution() is execution


def view(request: HttpRequest) -> HttpResponse:
    call("child", nothing)
    return JsonResponse({}, status=201)


async def aview(request: HttpRequest) -> HttpResponse:
    await aidempotent_call(acall("grandchild"), key="child", scope="calls", policy=LEASED)
    return JsonResponse({}, status=201)


def acall(key: str) -> Any:
    async def fn(execution: ExecutionContext) -> None:
        assert current_execution() is execution
        await sync_to_async(call)(key, nothing)

    return fn


urlpatterns = [
    path("view/", idempotent(view)),
    path("leased/", idempotent(view, mode="leased")),
    path("async/", idempotent(aview)),
]


def parents() -> dict[str, str]:
    """The key of each record's parent, by the record's key."""
    return {
        row.key: referred(row.caused_by)[0] for row in IdempotencyKey.objects.all() if row.caused_by
    }


@pytest.mark.parametrize("policy", [Policy(), LEASED], ids=["transactional", "leased"])
def test_calls_within_calls(policy: Policy) -> None:
    """Each record names the record whose handler asked for it, and nobody else's."""

    def child(execution: ExecutionContext) -> None:
        call("grandchild", nothing)
        assert current_execution() is execution

    def parent(execution: ExecutionContext) -> None:
        call("one", child)
        call("other", nothing)

    call("parent", parent, policy)
    call("stranger", nothing)
    assert current_execution() is None
    assert parents() == {"one": "parent", "other": "parent", "grandchild": "one"}
    row = IdempotencyKey.objects.get(key="one")
    assert referred(row.caused_by) == ("parent", "calls")


@pytest.mark.parametrize("where", ["view", "leased"])
def test_request_is_a_parent(client: Client, where: str) -> None:
    """What a request calls names the request."""
    key = new_key()
    assert post(client, f"/{where}/", key).status_code == 201
    assert parents() == {"child": key}


def test_async_request_is_a_parent(client: Client) -> None:
    """So does what an async view calls, in its own task and in threads."""
    key = new_key()
    assert post(client, "/async/", key).status_code == 201
    assert parents() == {"child": key, "grandchild": "child"}


def test_simultaneous_executions() -> None:
    """Executions side by side, in tasks and in threads, do not take each other for parents."""
    barrier = threading.Barrier(2, timeout=60)

    def meet(key: str) -> Any:
        async def fn(execution: ExecutionContext) -> None:
            await sync_to_async(barrier.wait, thread_sensitive=False)()
            await aidempotent_call(anothing, key=f"{key}-child", scope="calls")

        return fn

    async def anothing(execution: ExecutionContext) -> None:
        assert current_execution() is execution

    async def both() -> None:
        calls = (
            aidempotent_call(meet(key), key=key, scope="calls", policy=LEASED) for key in ("a", "b")
        )
        await asyncio.gather(*calls)

    async_to_sync(both)()
    assert parents() == {"a-child": "a", "b-child": "b"}


def test_resumed_by_another() -> None:
    """A take-over names the parent of the request that took over."""

    def explode(execution: ExecutionContext) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        call("child", explode)
    assert parents() == {}

    def parent(execution: ExecutionContext) -> None:
        call("child", explode)

    with pytest.raises(LookupError):
        call("parent", parent, LEASED)
    assert parents() == {"child": "parent"}
    call("child", nothing)
    assert parents() == {}
    assert IdempotencyKey.objects.get(key="child").attempt == 3


@pytest.mark.parametrize("scope", ["s", "a b", "user:1|POST /charges/", " x "])
def test_reference(scope: str) -> None:
    """A reference can be taken apart again, whatever is in the scope."""
    assert referred(reference("key-1", scope)) == ("key-1", scope)
