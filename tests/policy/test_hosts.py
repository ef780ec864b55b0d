"""One user, one key, two hosts: never the response of the other host."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from tests.models import Effect
from tests.support.shared import assert_problem, effects, is_replay, new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

ACME, GLOBEX = "acme.example", "globex.example"


def charge(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference=json.loads(request.body)["reference"])
    return JsonResponse({"tenant": request.META["HTTP_HOST"]}, status=201)


urlpatterns = [
    path("default/", idempotent(charge)),
]


@pytest.fixture
def client(settings: Any) -> Client:
    settings.ALLOWED_HOSTS = [ACME, GLOBEX]
    client = Client()
    client.force_login(User.objects.create_user("alice"))
    return client


def send(client: Client, path: str, key: str, host: str) -> HttpResponse:
    return post(client, path, key, headers={"Host": host})


def test_refused(client: Client) -> None:
    """A key that was used on another host is refused: nothing is shown, nothing executed."""
    key = new_key()
    assert send(client, "/default/", key, ACME).json() == {"tenant": ACME}
    refused = send(client, "/default/", key, GLOBEX)
    assert_problem(refused, 422, "mismatch")
    assert ACME.encode() not in refused.content
    for same in (ACME.upper(), f"{ACME}:8443", f"{ACME}."):
        assert is_replay(send(client, "/default/", key, same))
    assert effects() == 1


def test_host_that_is_not_allowed(client: Client, settings: Any) -> None:
    """A key changes nothing for a host that is not allowed: who asks for it refuses it, not we."""
    settings.ALLOWED_HOSTS = [ACME]
    for key in (None, new_key()):
        assert post(client, "/default/", key, headers={"Host": GLOBEX}).status_code == 201
