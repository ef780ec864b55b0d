"""A key whose attempt may have charged somebody belongs to its request, whatever became of it."""

from __future__ import annotations

import json

import pytest
from django.contrib import admin
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from idempotency_django.stores.records import Status
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


urlpatterns = [
    path("admin/", admin.site.urls),
    path("transactional/", idempotent(charge)),
    path("leased/", idempotent(mode="leased")(charge)),
]


def pay(client: Client, url: str, key: str, amount: int) -> HttpResponse:
    client.raise_request_exception = False
    return client.post(
        url, {"amount": amount}, content_type="application/json", headers={"Idempotency-Key": key}
    )


@pytest.mark.parametrize("url", ["/transactional/", "/leased/"])
def test_another_order(client: Client, url: str) -> None:
    """If an order fails after its charge, another one under its key is refused, and never given the
    first one's charge; the first goes on.
    """
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


@pytest.mark.parametrize("url", ["/transactional/", "/leased/"])
def test_nothing_derived(client: Client, url: str) -> None:
    """An attempt that failed before it could have charged leaves its key free for any request."""
    key = new_key()
    busy.append(True)
    assert pay(client, url, key, 500).status_code == 503
    busy.clear()
    assert pay(client, url, key, 700).status_code == 201
    assert list(charged.values()) == [700]
