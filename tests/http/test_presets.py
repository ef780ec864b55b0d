"""The policies that the package offers, on the views that they are for."""

from __future__ import annotations

import pytest
from django.http import HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django import PAYMENT, IdempotentRequest, idempotent
from tests.models import Effect
from tests.support.shared import assert_problem, assert_replays, effects, new_key

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


def charge() -> int:
    return Effect.objects.create(reference="charged").pk


@idempotent(policy=PAYMENT)
def pay(request: IdempotentRequest) -> HttpResponse:
    return JsonResponse({"id": request.idempotency.step("charge", charge)}, status=201)


urlpatterns = [path("pay/", pay)]


def test_payment() -> None:
    """A payment has steps, and a client that retries for weeks; it is refused without a key."""
    client, key = Client(), new_key()
    assert_problem(client.post("/pay/"), 400, "key-missing")
    first, again = (client.post("/pay/", headers={"Idempotency-Key": key}) for _ in "ab")
    assert first.status_code == 201
    assert_replays(first, again)
    assert effects("charged") == 1
    assert int(first["Idempotency-Status"].partition("ttl=")[2]) > 29 * 86400
