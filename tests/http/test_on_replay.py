"""``Policy(on_replay=…)`` alters replays, and neither the first response nor the record."""

from __future__ import annotations

import json

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from idempotency_django import Policy, idempotent
from tests.models import Effect
from tests.support.shared import effects, new_key

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


def create(request: HttpRequest) -> HttpResponse:
    return HttpResponse(json.dumps({"id": Effect.objects.create(reference="a").pk}), "text/plain")


async def later(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    return response


urlpatterns = [
    path("wrong/", idempotent(on_replay=lambda request, response: None)(create)),
]


def send(where: str, key: str) -> HttpResponse:
    return Client().post(where, headers={"Idempotency-Key": key})


def test_wrong_return() -> None:
    """A function that returns no response is an error that says so; the effect stays one."""
    key = new_key()
    assert send("/wrong/", key).status_code == 200
    with pytest.raises(ImproperlyConfigured, match="returned a NoneType; it must return the resp"):
        send("/wrong/", key)
    assert effects() == 1


def test_refused() -> None:
    """A coroutine function is refused where the policy is made."""
    with pytest.raises(ImproperlyConfigured, match="must be None or a plain function of a request"):
        Policy(on_replay=later)
