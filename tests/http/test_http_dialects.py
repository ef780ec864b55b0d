"""Both dialects of HTTP, on views of Django and of REST framework.

``SPOKEN`` has a row for each dialect: what its clients get back.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from django.db import connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client, override_settings
from django.urls import path
from rest_framework.authentication import SessionAuthentication
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django import signals
from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.errors import all_errors
from idempotency_django.http.problems import error_body
from idempotency_django.policy import Policy, scopes
from idempotency_django.testing import in_threads
from tests.models import Effect
from tests.support.shared import effects, logged_in, new_key
from tests.support.ways import MIDDLEWARE

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
]

# What clients of a dialect get back.


def problem_type(response: HttpResponse) -> str:
    return str(json.loads(response.content)["type"]).rpartition("#")[2]


def member(*path: str | int) -> Callable[[HttpResponse], Any]:
    """What a JSON body has there."""

    def read(response: HttpResponse) -> Any:
        value = json.loads(response.content)
        for each in path:
            value = value[each]
        return value

    return read


@dataclass
class Spoken:
    """What clients of a dialect see.

    Attributes:
        dialect: its name.
        read: reads from an error what tells it from others.
        mismatch: the status and that of a key that was used for another request.
        in_progress: likewise, while the first request runs.
        malformed: likewise, for a key that is too long.
        missing: likewise, for no key where one is required.
        media_type: of an error.
        refused: the headers of a mismatch.
    """

    dialect: str
    read: Callable[[HttpResponse], Any]
    mismatch: tuple[int, Any]
    in_progress: tuple[int, Any]
    malformed: tuple[int, Any]
    missing: tuple[int, Any]
    media_type: str
    refused: dict[str, str] = field(default_factory=dict)


SPOKEN = [
    Spoken(
        "ietf",
        problem_type,
        mismatch=(422, "mismatch"),
        in_progress=(409, "in-progress"),
        malformed=(400, "key-malformed"),
        missing=(400, "key-missing"),
        media_type="application/problem+json",
    ),
    Spoken(
        "stripe",
        member("error", "type"),
        mismatch=(400, "idempotency_error"),
        in_progress=(409, "idempotency_error"),
        malformed=(400, "idempotency_error"),
        missing=(400, "idempotency_error"),
        media_type="application/json",
        refused={"Stripe-Should-Retry": "false"},
    ),
]


@pytest.fixture(params=SPOKEN, ids=lambda spoken: spoken.dialect)
def spoken(request: pytest.FixtureRequest) -> Iterator[Spoken]:
    """Each dialect, while it is the project's."""
    with override_settings(IDEMPOTENCY={"DIALECT": request.param.dialect}):
        yield request.param


# The views.


def create(request: HttpRequest) -> HttpResponse:
    """Writes an effect, and reads the whole body itself."""
    data = request.POST or json.loads(request.body)
    Effect.objects.create(reference=data["reference"])
    return JsonResponse({"reference": data["reference"], "read": sorted(data)}, status=201)


class NoCsrf(SessionAuthentication):
    def enforce_csrf(self, request: Request) -> None:
        """Not what is tested here."""


class Create(APIView):
    """Likewise, with REST framework."""

    authentication_classes: ClassVar[list[Any]] = [NoCsrf]
    renderer_classes: ClassVar[list[Any]] = [JSONRenderer]

    def post(self, request: Request) -> Response:
        """Writes an effect."""
        Effect.objects.create(reference=request.data["reference"])
        shown = {"reference": request.data["reference"], "read": sorted(request.data)}
        return Response(shown, status=201)


def by_mixin(policy: Policy) -> Any:
    body = {"idempotency_policy": policy}
    return type("Mixed", (IdempotentViewMixin, Create), body).as_view()


WAYS: dict[str, Callable[[Policy], Any]] = {
    "decorator": lambda policy: idempotent(policy=policy)(create),
    "mixin": by_mixin,
}
each_way = pytest.mark.parametrize("way", WAYS)

urlpatterns = [path(f"{way}/", protect(Policy(operation=way))) for way, protect in WAYS.items()]


@pytest.fixture(autouse=True)
def _middleware() -> Iterator[None]:
    with override_settings(MIDDLEWARE=MIDDLEWARE):
        yield


@pytest.fixture
def alice() -> Client:
    return logged_in("alice")


def send(client: Client, way: str, key: str | None, reference: str = "a") -> HttpResponse:
    headers = {} if key is None else {"Idempotency-Key": key}
    return json_post(client, f"/{way}/", {"reference": reference}, **headers)


def json_post(client: Client, url: str, body: Any, **headers: str) -> HttpResponse:
    return client.post(url, json.dumps(body), content_type="application/json", headers=headers)


def assert_refused(response: HttpResponse, spoken: Spoken, expected: tuple[int, Any]) -> None:
    """The response is an error in the dialect."""
    assert (response.status_code, spoken.read(response)) == expected, response.content
    assert response["Content-Type"].partition(";")[0] == spoken.media_type


def assert_headers(response: HttpResponse, expected: dict[str, str]) -> None:
    assert {name: response.headers.get(name) for name in expected} == expected


@each_way
class TestContract:
    """What holds for each dialect and each way to protect a view."""

    def test_other_body(self, spoken: Spoken, way: str, alice: Client) -> None:
        """The same key with another body is refused, and executes nothing."""
        key = new_key()
        send(alice, way, key)
        other = send(alice, way, key, "b")
        assert_refused(other, spoken, spoken.mismatch)
        assert_headers(other, spoken.refused)
        assert effects("b") == 0

    def test_in_progress(self, spoken: Spoken, way: str, alice: Client) -> None:
        """A duplicate while the first request holds its claim is refused, and may come again."""
        if connection.vendor == "sqlite":
            pytest.skip("SQLite makes it wait")
        key, inner, once = new_key(), [], threading.Lock()

        def duplicate(**_: Any) -> None:
            if once.acquire(blocking=False):
                inner.extend(in_threads([lambda: send(bob, way, key)]))

        bob = logged_in("alice")
        signals.claimed.connect(duplicate)
        try:
            first = send(alice, way, key)
        finally:
            signals.claimed.disconnect(duplicate)
        assert first.status_code == 201
        assert_refused(inner[0], spoken, spoken.in_progress)
        assert inner[0]["Retry-After"] == "1"
        assert effects() == 1

    def test_malformed(self, spoken: Spoken, way: str, alice: Client) -> None:
        """A key that is too long is refused."""
        assert_refused(send(alice, way, "k" * 256), spoken, spoken.malformed)
        assert effects() == 0


class TestStripe:
    """What Stripe's clients rely on."""

    @pytest.fixture(autouse=True)
    def _dialect(self, settings: Any) -> None:
        settings.IDEMPOTENCY = {"DIALECT": "stripe"}

    def test_another_endpoint(self, alice: Client) -> None:
        """With ``scopes.per_caller``, the same key on another endpoint is refused."""
        key = {"Idempotency-Key": new_key()}
        assert json_post(alice, "/of-caller/1/", {"reference": "a"}, **key).status_code == 201
        other = json_post(alice, "/of-caller/2/", {"reference": "a"}, **key)
        assert other.status_code == 400
        assert effects() == 1


of_caller = idempotent(scope=scopes.per_caller)(create)
urlpatterns += [
    *(path(f"of-caller/{each}/", of_caller) for each in (1, 2)),
]


def test_required(spoken: Spoken, alice: Client) -> None:
    """A request without a required key is refused, and one with a key is replayed."""
    options = {"DIALECT": spoken.dialect, "POLICY": {"required": True}}
    with override_settings(IDEMPOTENCY=options):
        assert_refused(json_post(alice, "/default/", {"reference": "a"}), spoken, spoken.missing)
        key = {"Idempotency-Key": new_key()}
        for _ in range(2):
            assert json_post(alice, "/default/", {"reference": "a"}, **key).status_code == 201
    assert effects() == 1


def test_every_error(spoken: Spoken) -> None:
    """Each dialect has a body for each error."""
    for error in all_errors():
        body = error_body(error())
        assert json.dumps(body)
        assert error.default_detail[:30] in str(body)


@idempotent
def default(request: HttpRequest) -> HttpResponse:
    return create(request)


urlpatterns += [path("default/", default)]
