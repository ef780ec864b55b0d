"""Callers whom no adapter can tell apart: views that authenticate inside themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import AnonymousUser, Group, User
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.test.utils import isolate_apps
from django.urls import path
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.http.invocations import principal_of
from idempotency_django.policy import Policy
from idempotency_django.policy.invocation import Invocation
from tests.models import Effect
from tests.support.shared import (
    assert_guessable,
    assert_problem,
    effects,
    is_replay,
    logged_in,
    new_key,
    post,
    record,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

TOKENS = {"token-1": "1", "token-1-refreshed": "1", "token-2": "2"}


def owner_of(request: Any) -> str | None:
    """Whose token it is, as the view looks it up itself."""
    return TOKENS.get(request.headers.get("Authorization", "").removeprefix("Bearer "))


def with_token(request: HttpRequest) -> HttpResponse:
    owner = owner_of(request)
    if owner is None:
        return JsonResponse({"detail": "Who are you?"}, status=401)
    Effect.objects.create(reference=json.loads(request.body)["reference"])
    return JsonResponse({"secret of": owner}, status=201)


async def awith_token(request: HttpRequest) -> HttpResponse:
    return await sync_to_async(with_token)(request)


def with_api_key(request: HttpRequest) -> HttpResponse:
    if request.headers.get("X-Api-Key") != "good":
        return JsonResponse({}, status=401)
    Effect.objects.create(reference=json.loads(request.body)["reference"])
    return JsonResponse({"secret": True}, status=201)


class Mixed(IdempotentViewMixin, APIView):
    authentication_classes: list[Any] = []
    permission_classes: list[Any] = []

    def post(self, request: Request) -> Response:
        owner = owner_of(request)
        if owner is None:
            return Response({}, status=401)
        Effect.objects.create(reference=request.data["reference"])
        return Response({"secret of": owner}, status=201)


def known(call: Invocation) -> str | None:
    owner = owner_of(call.request)
    return owner and f"token-owner:{owner}"


class Identified(Mixed):
    idempotency_policy = Policy(principal=known)


urlpatterns = [
    path("decorated/", idempotent(with_token)),
    path("async/", idempotent(awith_token)),
    path("api-key/", idempotent(with_api_key)),
    path("mixin/", Mixed.as_view()),
    path("identified/", idempotent(principal=known)(with_token)),
    path("identified-mixin/", Identified.as_view()),
    path("unbound/", idempotent(principal=False)(with_token)),
]


def send(path: str, key: str, token: str | None, client: Client | None = None) -> HttpResponse:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return post(client or Client(), path, key, headers=headers)


@pytest.mark.parametrize("path", ["/decorated/", "/async/", "/mixin/"])
class TestCredentials:
    @pytest.mark.parametrize(
        "token", ["token-2", "rejected", None], ids=["another", "rejected", "none"]
    )
    def test_others(self, path: str, token: str | None) -> None:
        """Other credentials, rejected ones and none at all are refused; nothing is executed."""
        key = new_key()
        assert send(path, key, "token-1").status_code == 201
        refused = send(path, key, token)
        assert_problem(refused, 422, "mismatch")
        assert b"secret" not in refused.content
        assert effects() == 1

    def test_rejected_first(self, path: str) -> None:
        """Whom the view itself rejects leaves the key free for others."""
        key = new_key()
        assert send(path, key, "rejected").status_code == 401
        assert send(path, key, "token-1").status_code == 201
        assert effects() == 1


def test_unknown_callers() -> None:
    """Where a view reads something else than ``Authorization``, only the key protects a response:
    it must be unguessable.
    """
    key = new_key()
    headers = {"X-Api-Key": "good"}
    assert post(Client(), "/api-key/", key, headers=headers).status_code == 201
    assert is_replay(post(Client(), "/api-key/", key))
    assert_guessable(post(Client(), "/api-key/", "order-17", headers=headers))
    assert effects() == 1


def test_known_principal() -> None:
    """Where the user is known, a new token or session of theirs receives the response."""
    user, key = User.objects.create_user("alice"), new_key()
    for token, replayed in (("token-1", False), ("token-1-refreshed", True)):
        client = Client()
        client.force_login(user)
        response = send("/decorated/", key, token, client)
        assert (response.status_code, is_replay(response)) == (201, replayed)
    assert effects() == 1


@pytest.mark.parametrize("path", ["/identified/", "/identified-mixin/"])
class TestPrincipal:
    """A view that authenticates itself tells its policy who is calling."""

    def test_refreshed(self, path: str) -> None:
        """Then a refreshed token receives the response."""
        key = new_key()
        assert send(path, key, "token-1").status_code == 201
        assert is_replay(send(path, key, "token-1-refreshed"))
        assert effects() == 1

    def test_short_key(self, path: str) -> None:
        """A known principal may use any key; for an unknown one it must be unguessable."""
        assert send(path, "order-17", "token-1").status_code == 201
        assert_guessable(send(path, "order-17", "rejected"))


def test_unbound() -> None:
    """``principal=False`` gives the response to whoever knows the key, as it says."""
    key = new_key()
    assert send("/unbound/", key, "token-1").status_code == 201
    assert is_replay(send("/unbound/", key, "token-2"))


class Key:
    """What identifies a caller who is no user: a saved row, for one."""

    def __init__(self, pk: Any) -> None:
        self.pk = pk


class Nameless(Key):
    is_authenticated = True


def caller_of(kind: str, name: str) -> tuple[Any, Any]:
    """What an authentication returns that has read the name in a header of its own."""
    return {
        "user": (User(pk=len(name), username=name), None),
        "user and key": (User(pk=len(name), username=name), Key(1)),
        "row": (AnonymousUser(), Key(name)),
        "text": (AnonymousUser(), f"secret of {name}"),
        "claims": (AnonymousUser(), {"sub": name}),
        "empty text": (AnonymousUser(), ""),
        "nameless user": (Nameless(None), None),
        "nameless user and key": (Nameless(None), Key(name)),
    }[kind]


class OfAnyKind(BaseAuthentication):
    def authenticate(self, request: Any) -> Any:
        return caller_of(request.headers["X-Kind"], request.headers["X-Caller"])


class KnownSomehow(IdempotentViewMixin, APIView):
    authentication_classes = [OfAnyKind]

    def post(self, request: Request) -> Response:
        Effect.objects.create(reference=request.data["reference"])
        return Response({"secret of": request.headers["X-Caller"]}, status=201)


urlpatterns.append(path("any-kind/", KnownSomehow.as_view()))


PROXY = "Basic of-the-proxy"
NAMED = ["user", "user and key", "row", "text"]
NAMELESS = ["claims", "empty text", "nameless user", "nameless user and key"]


@pytest.mark.parametrize("proxy", ["", PROXY])
@pytest.mark.parametrize("kind", [*NAMED, *NAMELESS])
def test_two_callers_with_one_key(kind: str, proxy: str) -> None:
    """Each has a response of their own, whatever knows them; whom nothing names is refused."""
    key = new_key()

    def sent_by(name: str) -> HttpResponse:
        headers = {"X-Kind": kind, "X-Caller": name}
        headers |= {"Authorization": proxy} if proxy else {}
        return post(Client(), "/any-kind/", key, headers=headers)

    if kind in NAMELESS:
        with pytest.raises(ImproperlyConfigured, match="principal="):
            sent_by("alice")
        assert effects() == 0
        return
    assert sent_by("alice").json() == {"secret of": "alice"}
    assert "alice" not in record(key).principal  # which is shown: a token that is text is hashed
    assert is_replay(sent_by("alice"))
    assert sent_by("bob").json() == {"secret of": "bob"}
    assert effects() == 2


class TokenRow(Key):
    """A row for each token of an application, as django-oauth-toolkit has it."""

    application = Key("shop")


class ByToken(BaseAuthentication):
    """Reads the Authorization header, and says so; what it returns is of the token alone."""

    def authenticate(self, request: Any) -> Any:
        header = request.headers["Authorization"]
        token = header.removeprefix("Bearer ")
        returned = {
            "claims": {"sub": "shop"},
            "text": token,
            "bytes": token.encode(),
            "header": header,
            "row": TokenRow(token),
        }
        return AnonymousUser(), returned[request.headers["X-Kind"]]

    def authenticate_header(self, request: Any) -> str:
        return 'Bearer realm="api"'


class OfTokens(KnownSomehow):
    authentication_classes = [ByToken]

    def post(self, request: Request) -> Response:
        Effect.objects.create(reference=request.data["reference"])
        return Response({}, status=201)


urlpatterns.append(path("by-token/", OfTokens.as_view()))


@pytest.mark.parametrize("kind", ["claims", "text", "bytes", "header", "row"])
def test_refreshed_token(kind: str) -> None:
    """A token names nobody: with another one, nothing runs again, and no other caller's response
    is given.
    """
    key = new_key()

    def sent_with(token: str) -> HttpResponse:
        headers = {"X-Kind": kind, "Authorization": f"Bearer {token}"}
        return post(Client(), "/by-token/", key, headers=headers)

    assert sent_with("one").status_code == 201
    assert is_replay(sent_with("one"))
    again = sent_with("two")
    assert again.status_code == 422 or (kind == "row" and is_replay(again))
    assert effects() == 1


# One user, one key, two hosts.

ACME, GLOBEX = "acme.example", "globex.example"


def of_host(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    return JsonResponse({"tenant": request.META["HTTP_HOST"]}, status=201)


urlpatterns.append(path("host/", idempotent(of_host)))


def test_two_hosts(settings: Any) -> None:
    """A key that was used on another host is refused: nothing is shown, nothing executed."""
    settings.ALLOWED_HOSTS = [ACME, GLOBEX]
    client, key = logged_in("alice"), new_key()
    assert post(client, "/host/", key, headers={"Host": ACME}).json() == {"tenant": ACME}
    refused = post(client, "/host/", key, headers={"Host": GLOBEX})
    assert_problem(refused, 422, "mismatch")
    assert ACME.encode() not in refused.content
    for same in (ACME.upper(), f"{ACME}:8443", f"{ACME}."):
        assert is_replay(post(client, "/host/", key, headers={"Host": same}))
    assert effects() == 1


def test_host_that_is_not_allowed(settings: Any) -> None:
    """A key changes nothing for a host that is not allowed: the view that asks refuses it."""
    settings.ALLOWED_HOSTS = [ACME]
    for key in (None, new_key()):
        response = post(logged_in("alice"), "/host/", key, headers={"Host": GLOBEX})
        assert response.status_code == 201


# How callers are named.


class Person:
    """A caller that is no model's."""

    is_authenticated = True

    def __init__(self, pk: object) -> None:
        self.pk = pk


def as_user(thing: Any) -> Any:
    """An instance of any model, as a user."""
    thing.is_authenticated = True
    return thing


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (User(pk=1), User(pk=11)),
        (User(pk=1), as_user(Group(pk=1))),
        (User(pk="auth.group:1"), as_user(Group(pk=1))),
        (User(pk=1), Person(1)),
        (as_user(Group(pk=1)), Person("auth.group:1")),
    ],
)
def test_two_callers_have_two_names(one: object, other: object) -> None:
    """Two users of any models never have one name, whatever their primary keys are."""
    assert principal_of(one) != principal_of(other)


@isolate_apps("tests")
def test_proxy_is_the_same_user() -> None:
    """A user that was loaded through a proxy model is the same caller."""

    class Employee(User):
        class Meta:
            proxy = True
            app_label = "tests"

    assert principal_of(Employee(pk=42)) == principal_of(User(pk=42))
