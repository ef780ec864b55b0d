"""``idempotent_call``: the same guarantees for plain Python; and who has called whom."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client, override_settings
from django.urls import path

from idempotency_django.decorators import idempotent
from idempotency_django.engine.context import ExecutionContext, current_execution
from idempotency_django.engine.functions import aidempotent_call, idempotent_call
from idempotency_django.errors import (
    FingerprintMismatch,
    OperationHeld,
    OperationInProgress,
    ResponseNotStored,
)
from idempotency_django.models import DatabaseNow, IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.stores.records import reference, referred
from tests.models import Effect
from tests.support.shared import effects, new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

MODES = [Policy(), Policy(mode="leased"), Policy(store="memory")]
STORES = {
    "default": {"BACKEND": "idempotency_django.stores.database.DatabaseStore"},
    "memory": {"BACKEND": "idempotency_django.stores.memory.MemoryStore"},
}


@pytest.fixture(autouse=True)
def _stores() -> Any:
    with override_settings(IDEMPOTENCY={"STORES": STORES}):
        yield


@pytest.fixture(params=MODES, ids=["transactional", "leased", "memory"])
def policy(request: pytest.FixtureRequest) -> Policy:
    return request.param


def pay(execution: ExecutionContext) -> Any:
    """Do it, and say what came of it."""
    Effect.objects.create(reference="a")
    return {"paid": True, "attempt": execution.attempt, "pair": (1, 2)}


def call(policy: Policy, fn: Any = pay, key: str = "order-17", **arguments: Any) -> Any:
    return idempotent_call(fn, key=key, scope="payments", policy=policy, **arguments)


def test_once(policy: Policy) -> None:
    """The function is called once; every call returns what it returned, in the same form."""
    first = call(policy)
    assert first == call(policy) == {"paid": True, "attempt": 1, "pair": [1, 2]}
    assert effects() == 1
    assert call(policy, key="order-18") == first
    assert effects() == 2


def test_fingerprint(policy: Policy) -> None:
    """The same key for something else is refused; the order of members does not matter."""
    call(policy, fingerprint={"amount": 1, "to": "bob"})
    call(policy, fingerprint={"to": "bob", "amount": 1})
    with pytest.raises(FingerprintMismatch, match=r"'order-17' of pay was already used with"):
        call(policy, fingerprint={"amount": 2, "to": "bob"})
    assert effects() == 1


def test_result_of_djangos_types(policy: Policy) -> None:
    """The first call and a replay return what Django's encoder writes, read back as JSON."""
    made = {
        "at": datetime(2030, 1, 2, tzinfo=UTC),
        "paid": Decimal("5.00"),
        "lines": (1, UUID(int=7)),
    }
    as_json = {"at": "2030-01-02T00:00:00Z", "paid": "5.00", "lines": [1, str(UUID(int=7))]}
    step = policy.mode == "leased"

    def pay(execution: ExecutionContext) -> Any:
        return execution.step("pay", lambda: made) if step else made

    assert call(policy, pay) == call(policy, pay) == as_json


def test_result_that_is_not_json(policy: Policy) -> None:
    """A result that cannot be stored is refused with a clear error, and rolls back."""

    def wrong(execution: ExecutionContext) -> Any:
        Effect.objects.create(reference="a")
        return object()

    with pytest.raises(TypeError, match="is not JSON, so it cannot be stored"):
        call(policy, wrong)
    if policy is MODES[0]:
        assert effects() == 0
    assert call(policy)["attempt"] == 2


def test_in_progress_and_held() -> None:
    """While it runs, and while it is held after an interruption, others are told."""
    policy = Policy(mode="leased", on_interrupted="hold")
    told: list[str] = []

    def meddle(execution: ExecutionContext) -> Any:
        with pytest.raises(OperationInProgress, match=r"'order-17' of .*meddle is") as refused:
            call(policy, meddle)
        assert refused.value.remaining is not None
        assert 0 < refused.value.remaining <= 30
        past = DatabaseNow() - timedelta(seconds=1)
        IdempotencyKey.objects.update(lease_expires_at=past)
        with pytest.raises(OperationHeld, match=r"failed or was interrupted.*in the admin"):
            call(policy, meddle)
        told.append("both")
        return None

    assert call(policy, meddle) is None
    assert told == ["both"]


@pytest.mark.parametrize(("body", "result"), [(b"", None), (b"done", "done"), (b"[1]", [1])])
def test_completed_by_hand(body: bytes, result: Any) -> None:
    """A result that an operator wrote by hand is returned, even if it is not JSON."""
    call(MODES[0])
    IdempotencyKey.objects.update(response_body=body)
    assert call(MODES[0]) == result
    assert effects() == 1


def test_async() -> None:
    """A coroutine function is awaited, once."""

    async def apay(execution: ExecutionContext) -> Any:
        await Effect.objects.acreate(reference="a")
        return [execution.attempt]

    async def twice() -> list[Any]:
        try:
            return [
                await aidempotent_call(apay, key="order-17", scope="payments") for _ in range(2)
            ]
        finally:
            await sync_to_async(connections.close_all)()

    assert asyncio.run(twice()) == [[1], [1]]
    assert effects() == 1
    assert IdempotencyKey.objects.get().operation == "test_async.<locals>.apay"


def test_store_that_does_not_roll_back(settings: Any) -> None:
    """A call whose store takes no part in the transaction around it is refused."""
    backend = "idempotency_django.stores.memory.MemoryStore"
    settings.IDEMPOTENCY = {"STORES": {"default": {"BACKEND": backend}}}
    calls: list[int] = []
    with transaction.atomic(), pytest.raises(ImproperlyConfigured, match="move it inside"):
        idempotent_call(lambda _: calls.append(1), key="order-1", scope="s")
    assert calls == []


def test_large_result() -> None:
    """A result that is too large to keep is returned once; then the caller is told so."""
    policy = Policy(max_response_bytes=10)
    assert call(policy)["paid"]
    with pytest.raises(ResponseNotStored):
        call(policy)
    assert effects() == 1


# Which operation has caused which: each record names its parent.


LEASED = Policy(mode="leased")


def called(key: str, fn: Any, policy: Policy | None = None) -> Any:
    return idempotent_call(fn, key=key, scope="calls", policy=policy)


def nothing(execution: ExecutionContext) -> None:
    assert current_execution() is execution


def view(request: HttpRequest) -> HttpResponse:
    called("child", nothing)
    return JsonResponse({}, status=201)


async def aview(request: HttpRequest) -> HttpResponse:
    await aidempotent_call(acall("grandchild"), key="child", scope="calls", policy=LEASED)
    return JsonResponse({}, status=201)


def acall(key: str) -> Any:
    async def fn(execution: ExecutionContext) -> None:
        assert current_execution() is execution
        await sync_to_async(called)(key, nothing)

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
        called("grandchild", nothing)
        assert current_execution() is execution

    def parent(execution: ExecutionContext) -> None:
        called("one", child)
        called("other", nothing)

    called("parent", parent, policy)
    called("stranger", nothing)
    assert current_execution() is None
    assert parents() == {"one": "parent", "other": "parent", "grandchild": "one"}
    row = IdempotencyKey.objects.get(key="one")
    assert referred(row.caused_by) == ("parent", "calls")


@pytest.mark.parametrize(
    ("where", "descendants"),
    [
        ("view", {"child"}),
        ("leased", {"child"}),
        ("async", {"child", "grandchild"}),
    ],
)
def test_request_is_a_parent(client: Client, where: str, descendants: set[str]) -> None:
    """What a request calls names the request, also in tasks and threads of an async view."""
    key = new_key()
    assert post(client, f"/{where}/", key).status_code == 201
    assert parents() == {each: "child" if each == "grandchild" else key for each in descendants}


def test_resumed_by_another() -> None:
    """A take-over names the parent of the request that took over."""

    def explode(execution: ExecutionContext) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        called("child", explode)
    assert parents() == {}

    def parent(execution: ExecutionContext) -> None:
        called("child", explode)

    with pytest.raises(LookupError):
        called("parent", parent, LEASED)
    assert parents() == {"child": "parent"}
    called("child", nothing)
    assert parents() == {}
    assert IdempotencyKey.objects.get(key="child").attempt == 3


@pytest.mark.parametrize("scope", ["s", "a b", "user:1|POST /charges/", " x "])
def test_reference(scope: str) -> None:
    """A reference can be taken apart again, whatever is in the scope."""
    assert referred(reference("key-1", scope)) == ("key-1", scope)
