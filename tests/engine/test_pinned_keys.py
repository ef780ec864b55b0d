"""A key whose attempt may have charged somebody belongs to its request, whatever became of it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from django.contrib import admin
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import Store
from idempotency_django.stores.records import Claim, Operation, Record, Status
from idempotency_django.testing import an_operation, eventually
from tests.support.shared import assert_problem, is_replay, new_key, record

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.urls(__name__),
]

charged: dict[str, int] = {}
"""What the provider has charged, by its own idempotency keys, which it never charges twice."""
down: list[bool] = []
"""Whether what comes after the charge fails."""
busy: list[bool] = []
"""Whether nothing is charged at all."""


@pytest.fixture(autouse=True)
def _provider() -> None:
    charged.clear()
    down.clear()
    busy.clear()


def charge(request: HttpRequest) -> HttpResponse:
    """Charge somebody, and fail afterwards where the test says so."""
    amount = json.loads(request.body)["amount"]
    if busy:
        return JsonResponse({}, status=503)  # before anything was done
    derived = request.idempotency.derive_key("charge")  # type: ignore[attr-defined]
    paid = charged.setdefault(derived, amount)
    if down:
        raise ConnectionError
    return JsonResponse({"charged": paid}, status=201)


def in_steps(request: HttpRequest) -> HttpResponse:
    """The same, in a step that needs no derived key."""
    amount = json.loads(request.body)["amount"]
    if busy:
        return JsonResponse({}, status=503)
    execution = request.idempotency  # type: ignore[attr-defined]
    paid = execution.step("charge", lambda: charged.setdefault(execution.key, amount))
    if down:
        raise ConnectionError
    return JsonResponse({"charged": paid}, status=201)


urlpatterns = [
    path("admin/", admin.site.urls),
    path("transactional/", idempotent(charge)),
    path("leased/", idempotent(mode="leased")(charge)),
    path("steps/", idempotent(mode="leased")(in_steps)),
]


def pay(client: Client, url: str, key: str, amount: int) -> HttpResponse:
    client.raise_request_exception = False
    return client.post(
        url, {"amount": amount}, content_type="application/json", headers={"Idempotency-Key": key}
    )


@pytest.mark.parametrize("url", ["/transactional/", "/leased/", "/steps/"])
class TestRequests:
    """An order of 500 fails after its charge; then another order comes under its key."""

    def test_another_order(self, client: Client, url: str) -> None:
        """It is refused, and never given the first one's charge; the first goes on."""
        key = new_key()
        down.append(True)
        assert pay(client, url, key, 500).status_code == 500
        assert record(key).status == Status.FAILED
        down.clear()
        assert_problem(pay(client, url, key, 700), 422, "mismatch")
        assert list(charged.values()) == [500]
        retry = pay(client, url, key, 500)
        assert (retry.status_code, json.loads(retry.content)) == (201, {"charged": 500})
        assert is_replay(pay(client, url, key, 500))

    def test_a_later_failure_that_derives_nothing(self, client: Client, url: str) -> None:
        """An attempt that fails early, after one that had charged, does not free the key."""
        key = new_key()
        down.append(True)
        assert pay(client, url, key, 500).status_code == 500
        busy.append(True)
        assert pay(client, url, key, 500).status_code == 503
        assert record(key).attempt == 2
        busy.clear()
        down.clear()
        assert_problem(pay(client, url, key, 700), 422, "mismatch")


@pytest.mark.parametrize("url", ["/transactional/", "/leased/"])
def test_nothing_derived(client: Client, url: str) -> None:
    """An attempt that failed before it could have charged leaves its key free for any request."""
    key = new_key()
    busy.append(True)
    assert pay(client, url, key, 500).status_code == 503
    busy.clear()
    assert pay(client, url, key, 700).status_code == 201
    assert list(charged.values()) == [700]


def _claimed(store: Store, operation: Operation) -> Claim:
    claim = store.acquire(operation)
    assert isinstance(claim, Claim)
    return claim


def test_interrupted_attempt(store: Store) -> None:
    """What an attempt that died had derived is unknown, so its key stays with its request."""
    operation = an_operation(lease=timedelta(milliseconds=1))
    _claimed(store, operation)
    eventually(lambda: _found(store, operation).interrupted)
    second = _claimed(store, replace(operation, lease=timedelta(seconds=99)))
    assert store.fail(second, "before it had derived anything")
    assert isinstance(store.acquire(replace(operation, fingerprint="0" * 64)), Record)
    assert _claimed(store, operation).attempt == 3


def _found(store: Store, operation: Operation) -> Record:
    found = store.get(operation.key, operation.scope)
    assert found is not None
    return found


def test_released_by_an_operator(admin_client: Client, client: Client) -> None:
    """A key that an operator released is executed again for its own request only."""
    key = new_key()
    down.append(True)
    assert pay(client, "/leased/", key, 500).status_code == 500
    row = record(key)
    rows = IdempotencyKey.objects.filter(pk=row.pk)
    past = row.created_at - timedelta(hours=1)
    rows.update(status=Status.IN_PROGRESS, lease_expires_at=past, completed_at=None, error="")
    response = admin_client.post(
        f"/admin/idempotency_django/idempotencykey/{row.pk}/settle/",
        {
            "attempt": 1,
            "outcome": "release",
            "reason": "looked",
            "status": 200,
            "content_type": "application/json",
            "body": "",
        },
    )
    assert response.status_code == 302, response.content
    assert record(key).status == Status.FAILED
    down.clear()
    assert_problem(pay(client, "/leased/", key, 700), 422, "mismatch")
    assert pay(client, "/leased/", key, 500).status_code == 201


def test_deleted_by_an_operator(client: Client) -> None:
    """A record that was deleted leaves a key that is new to the store."""
    key = new_key()
    down.append(True)
    assert pay(client, "/leased/", key, 500).status_code == 500
    IdempotencyKey.objects.filter(key=key).delete()
    down.clear()
    assert pay(client, "/leased/", key, 700).status_code == 201
