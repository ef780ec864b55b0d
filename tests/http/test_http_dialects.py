"""Both dialects of HTTP, on views of Django and of REST framework: what their clients get back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from django.db import connection
from django.http import HttpResponse
from django.test import Client, override_settings
from django.urls import path
from rest_framework.authentication import SessionAuthentication
from rest_framework.request import Request

from idempotency_django import signals
from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.errors import all_errors
from idempotency_django.http.responses import error_body
from idempotency_django.policy import scopes
from idempotency_django.testing import in_threads
from tests.support.shared import effects, logged_in, new_key, post
from tests.support.views import DRF, create

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

Refusal = tuple[int, str, str]
"""The status, the media type, and what tells an error from others."""

PROBLEM, JSON = "application/problem+json", "application/json"
SPOKEN: dict[str, dict[str, Refusal]] = {
    "ietf": {
        "mismatch": (422, PROBLEM, "mismatch"),
        "in progress": (409, PROBLEM, "in-progress"),
        "malformed": (400, PROBLEM, "key-malformed"),
        "missing": (400, PROBLEM, "key-missing"),
    },
    "stripe": {
        "mismatch": (400, JSON, "idempotency_error"),
        "in progress": (409, JSON, "idempotency_error"),
        "malformed": (400, JSON, "idempotency_error"),
        "missing": (400, JSON, "idempotency_error"),
    },
}


@pytest.fixture(params=SPOKEN)
def spoken(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each dialect, while it is the project's."""
    with override_settings(IDEMPOTENCY={"DIALECT": request.param}):
        yield request.param


class NoCsrf(SessionAuthentication):
    def enforce_csrf(self, request: Request) -> None:
        """Not what is tested here."""


class Mixed(IdempotentViewMixin, DRF):
    authentication_classes: ClassVar[list[Any]] = [NoCsrf]


of_caller = idempotent(scope=scopes.per_caller)(create)
urlpatterns = [
    path("decorator/", idempotent(create)),
    path("mixin/", Mixed.as_view()),
    *(path(f"of-caller/{each}/", of_caller) for each in (1, 2)),
]
each_way = pytest.mark.parametrize("url", ["/decorator/", "/mixin/"])


@pytest.fixture
def alice() -> Client:
    return logged_in("alice")


def told(response: HttpResponse) -> Refusal:
    """What an error says, in whichever dialect."""
    body = json.loads(response.content)
    name = body["error"]["type"] if "error" in body else body["type"].rpartition("#")[2]
    return response.status_code, response["Content-Type"].partition(";")[0], name


@each_way
def test_other_body(spoken: str, url: str, alice: Client) -> None:
    """The same key with another body is refused, and executes nothing."""
    key = new_key()
    post(alice, url, key)
    other = post(alice, url, key, "b")
    assert told(other) == SPOKEN[spoken]["mismatch"]
    assert other.headers.get("Stripe-Should-Retry") == ("false" if spoken == "stripe" else None)
    assert effects("b") == 0


@each_way
def test_in_progress(spoken: str, url: str, alice: Client) -> None:
    """A duplicate while the first request holds its claim is refused, and may come again."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite makes it wait")
    key, inner, once = new_key(), [], threading.Lock()

    def duplicate(**_: Any) -> None:
        if once.acquire(blocking=False):
            inner.extend(in_threads([lambda: post(again, url, key)]))

    again = logged_in("alice")
    signals.claimed.connect(duplicate)
    try:
        first = post(alice, url, key)
    finally:
        signals.claimed.disconnect(duplicate)
    assert first.status_code == 201
    assert told(inner[0]) == SPOKEN[spoken]["in progress"]
    assert inner[0]["Retry-After"] == "1"
    assert effects() == 1


@each_way
def test_malformed(spoken: str, url: str, alice: Client) -> None:
    """A key that is too long is refused."""
    assert told(post(alice, url, "k" * 256)) == SPOKEN[spoken]["malformed"]
    assert effects() == 0


@each_way
def test_missing(spoken: str, url: str, alice: Client) -> None:
    """A request without a required key is refused."""
    with override_settings(IDEMPOTENCY={"DIALECT": spoken, "POLICY": {"required": True}}):
        assert told(post(alice, url)) == SPOKEN[spoken]["missing"]
    assert effects() == 0


def test_another_endpoint_of_stripe(alice: Client, settings: Any) -> None:
    """With ``scopes.per_caller``, the same key on another endpoint is refused."""
    settings.IDEMPOTENCY = {"DIALECT": "stripe"}
    key = new_key()
    assert post(alice, "/of-caller/1/", key).status_code == 201
    assert post(alice, "/of-caller/2/", key).status_code == 400
    assert effects() == 1


def test_every_error(spoken: str) -> None:
    """Each dialect has a body for each error."""
    for error in all_errors():
        body = error_body(error())
        assert json.dumps(body)
        assert error.default_detail[:30] in str(body)
