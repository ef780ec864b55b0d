"""``?key=…`` of the status views: the caller's own operations with a key, and nobody else's."""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from django.utils import timezone
from rest_framework.authentication import BaseAuthentication, TokenAuthentication
from rest_framework.authtoken.models import Token
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django import drf, idempotent, idempotent_call
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.http import views
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy, scopes
from idempotency_django.testing import in_threads
from tests.support.shared import logged_in, new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

seen: list[Any] = []
BEARER = {"Authorization": "Bearer secret"}


@idempotent
def charge(request: HttpRequest) -> HttpResponse:
    return HttpResponse(request.body, "text/plain", status=201, headers={"Location": "/c/1/"})


@idempotent
def picture(request: HttpRequest) -> HttpResponse:
    return HttpResponse(b"\xff\x00", "image/png")


def looking(request: HttpRequest) -> HttpResponse:
    """Looks for itself while it runs, as another request would."""
    alice, key = logged_in("alice"), request.idempotency.key  # type: ignore[attr-defined]
    seen.extend(in_threads([lambda: look(alice, key)]))
    return HttpResponse(status=204)


@idempotent(scope=scopes.shared)
def in_one_scope(request: HttpRequest) -> HttpResponse:
    return HttpResponse(status=204)


@idempotent(principal=lambda call: f"member:{call.request.headers['X-Member']}")
def of_members(request: HttpRequest) -> HttpResponse:
    return HttpResponse(status=204)


class ByToken(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = [TokenAuthentication]
    permission_classes: ClassVar[list[Any]] = [IsAuthenticated]
    idempotency_policy = Policy(required=True)

    def post(self, request: Request) -> Response:
        return Response({"by": request.user.pk}, status=201)


class StatusOfUsers(drf.IdempotencyStatusView):
    authentication_classes: ClassVar[list[Any]] = [TokenAuthentication]
    permission_classes: ClassVar[list[Any]] = [IsAuthenticated]


urlpatterns = [
    path("charges/", charge),
    path("pictures/", picture),
    path("leased/", idempotent(mode="leased")(looking)),
    path("transactional/", idempotent(looking)),
    path("shared/", in_one_scope),
    path("members/", of_members),
    path("tokens/", ByToken.as_view()),
    path("operations/plain/", views.IdempotencyStatusView.as_view()),
    path("operations/drf/", drf.IdempotencyStatusView.as_view()),
    path("operations/users/", StatusOfUsers.as_view()),
]


@pytest.fixture(params=["plain", "drf"])
def view(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def look(client: Client, key: str, view: str = "plain", **headers: str) -> Any:
    """The operations that a caller finds with a key."""
    response = client.get(f"/operations/{view}/", {"key": key}, headers=headers)
    assert response.status_code == 200, response.content
    assert "no-store" in response["Cache-Control"]
    return json.loads(response.content)["operations"]


def test_own(view: str) -> None:
    """The caller sees the response as it was stored, with status, headers and body."""
    alice = logged_in("alice")
    assert post(alice, "/charges/", "order-17").status_code == 201
    assert look(alice, "order-17", view) == [
        {
            "operation": "POST /charges/",
            "status": "completed",
            "attempt": 1,
            "response": {
                "status": 201,
                "headers": [["Location", "/c/1/"], ["Content-Type", "text/plain"]],
                "body": '{"reference": "a"}',
            },
        }
    ]
    assert look(alice, "order-18", view) == []


def test_bytes(view: str) -> None:
    """A body that is no text is there in base64."""
    alice = logged_in("alice")
    post(alice, "/pictures/", "picture-1")
    [found] = look(alice, "picture-1", view)
    assert found["response"]["body"] is None
    assert base64.b64decode(found["response"]["body_base64"]) == b"\xff\x00"


@pytest.mark.parametrize("url", ["/charges/", "/shared/"])
@pytest.mark.parametrize("key", ["order-17", new_key()], ids=["guessable", "unguessable"])
def test_another_user(view: str, url: str, key: str) -> None:
    """Nobody else sees it, whatever the key and the scope are: no user, and no visitor."""
    post(logged_in("alice"), url, key)
    assert len(look(logged_in("alice"), key, view)) == 1
    assert look(logged_in("bob"), key, view) == []
    assert look(Client(), key, view) == []
    assert look(Client(), key, view, **BEARER) == []


def test_case_of_a_caller(view: str) -> None:
    """A database that ignores case does not tell one caller what is another's."""
    alice = logged_in("alice")
    post(alice, "/charges/", "order-17")
    IdempotencyKey.objects.update(principal=f"USER:{User.objects.get().pk}")
    assert look(alice, "order-17", view) == []


def test_several_operations(view: str) -> None:
    """One key of one caller names several operations, of which another one's is not shown."""
    alice, bob = logged_in("alice"), logged_in("bob")
    for client in (alice, bob):
        for url in ("/charges/", "/pictures/"):
            post(client, url, "order-17")
    found = look(alice, "order-17", view)
    assert [each["operation"] for each in found] == ["POST /charges/", "POST /pictures/"]
    assert len(look(bob, "order-17", view)) == 2


def test_anonymous(view: str) -> None:
    """What a visitor did is nobody's own: knowing its key is not enough, for a replay also has to
    pass the view's own checks, and to ask for the same.
    """
    key = new_key()
    post(Client(), "/charges/", key)
    for client in (Client(), logged_in("alice")):
        assert look(client, key, view) == []


def test_authorization(view: str, settings: Any) -> None:
    """What came with an Authorization header is shown with the same one, and with no other."""
    key = new_key()
    headers = {**BEARER, "Idempotency-Key": key}
    assert Client().post("/charges/", {}, "application/json", headers=headers).status_code == 201
    stored = IdempotencyKey.objects.get().principal
    assert stored.startswith("authorization:")
    assert hashlib.sha256(BEARER["Authorization"].encode()).hexdigest() not in stored
    assert len(look(Client(), key, view, **BEARER)) == 1
    assert look(Client(), key, view, Authorization="Bearer other") == []
    assert look(Client(), key, view) == look(logged_in("alice"), key, view) == []
    settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
    settings.SECRET_KEY = "another"
    assert len(look(Client(), key, view, **BEARER)) == 1


def test_permission_of_a_drf_view() -> None:
    """The view's own authentication says who asks; Django's, without it, knows nobody."""
    user = User.objects.create(username="alice")
    token = {"Authorization": f"Token {Token.objects.create(user=user).key}"}
    headers = {**token, "Idempotency-Key": "order-17"}
    made = Client().post("/tokens/", {}, "application/json", headers=headers)
    assert made.status_code == 201
    assert Client().get("/operations/users/?key=order-17").status_code == 401
    [found] = look(Client(), "order-17", "users", **token)
    assert json.loads(found["response"]["body"]) == {"by": user.pk}
    assert look(Client(), "order-17", "plain", **token) == []
    other = Token.objects.create(user=User.objects.create(username="bob"))
    assert look(Client(), "order-17", "users", Authorization=f"Token {other.key}") == []


def test_principal_of_a_policy(view: str) -> None:
    """Whom only a policy knows, the view cannot recognise: it shows nothing."""
    key = new_key()
    alice = logged_in("alice")
    headers = {"X-Member": "7", "Idempotency-Key": key}
    alice.post("/members/", {}, "application/json", headers=headers)
    assert IdempotencyKey.objects.get().principal == "member:7"
    assert look(alice, key, view, **{"X-Member": "7"}) == []


def test_expired(view: str) -> None:
    """A response that is no longer replayed is not shown."""
    alice = logged_in("alice")
    post(alice, "/charges/", "order-17")
    IdempotencyKey.objects.update(expires_at=timezone.now() - timedelta(hours=1))
    assert look(alice, "order-17", view) == []


def test_in_progress() -> None:
    """A leased operation is visible while it runs, and a transactional one when it has ended."""
    alice = logged_in("alice")
    seen.clear()
    for url, key in (("/leased/", "order-17"), ("/transactional/", "order-18")):
        post(alice, url, key)
        assert [each["status"] for each in look(alice, key)] == ["completed"]
    assert [[each["status"] for each in found] for found in seen] == [["in_progress"], []]


def test_calls_are_not_shown(view: str) -> None:
    """A call is the server's own: its key is no client's, even if it is known."""
    key = new_key()
    assert idempotent_call(lambda execution: "secret", key=key, scope="calls") == "secret"
    assert look(Client(), key, view) == []


def test_failed(view: str) -> None:
    """What failed is said to have failed: a retry runs it."""
    alice = logged_in("alice")
    post(alice, "/charges/", "order-17")
    IdempotencyKey.objects.update(status="failed", response_status=None, response_body=None)
    assert [each["status"] for each in look(alice, "order-17", view)] == ["failed"]


@pytest.mark.parametrize("query", ["", "?key=", "?key=%00", "?key=ü", "?key=" + "a" * 256])
def test_no_key(view: str, query: str) -> None:
    """Without a valid key, the view says so: an empty list would look like a key that is free."""
    response = logged_in("alice").get(f"/operations/{view}/{query}")
    assert (response.status_code, json.loads(response.content)["code"]) == (400, "key-malformed")


def test_quoted(view: str) -> None:
    """The key is found as the header has it, with its quotation marks, too."""
    post(logged_in("alice"), "/charges/", "order-17")
    assert len(look(logged_in("alice"), '"order-17"', view)) == 1


def test_stores_without_a_database(view: str, settings: Any) -> None:
    """Only the records in databases are found by their keys."""
    memory = {"BACKEND": "idempotency_django.stores.memory.MemoryStore"}
    settings.IDEMPOTENCY = {"STORES": {"default": memory}}
    alice = logged_in("alice")
    post(alice, "/charges/", "order-17")
    assert look(alice, "order-17", view) == []


class WithoutPrimaryKey:
    """A user whom only the policy of a view can name."""

    is_authenticated = True


class ByName(BaseAuthentication):
    def authenticate(self, request: Request) -> tuple[WithoutPrimaryKey, None]:
        return WithoutPrimaryKey(), None


class NamedStatus(drf.IdempotencyStatusView):
    authentication_classes: ClassVar[list[Any]] = [ByName]


urlpatterns.append(path("operations/named/", NamedStatus.as_view()))


def test_user_without_a_primary_key() -> None:
    """Whom only a policy's ``principal=`` can name finds nothing, and sees no error."""
    assert look(Client(), new_key(), "named") == []
