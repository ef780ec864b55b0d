"""Where two things of a project meet: bases and exemptions, loops and handlers, users, forms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib import admin
from django.contrib.auth.models import Group, User
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path
from django.views.generic import View
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotency_exempt, idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.support.shared import assert_problem, assert_replays, effects, is_replay, new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


@idempotency_exempt
class Metrics(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        Effect.objects.create(reference="a")
        return JsonResponse({}, status=201)


class Payments(Metrics):
    idempotency_policy = Policy(required=True)


class Deadlocked(APIView):
    """Fails in its first run and not in its second."""

    authentication_classes: list[Any] = []

    def post(self, request: Request) -> Response:
        Effect.objects.create(reference="a")
        if self.runs == 1:
            raise OperationalError("deadlock detected")
        return Response({}, status=201)


class Retries:
    """A loop around ``dispatch()``, as projects have one for deadlocks."""

    runs = 0

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.runs += 1
            return super().dispatch(*args, **kwargs)  # type: ignore[misc]
        except OperationalError:
            self.runs += 1
            return super().dispatch(*args, **kwargs)  # type: ignore[misc]


class LoopOutside(Retries, IdempotentViewMixin, Deadlocked):
    pass


class LoopInside(IdempotentViewMixin, Retries, Deadlocked):
    pass


class Looks(IdempotentViewMixin, APIView):
    """Looks at its body, or not."""

    authentication_classes: list[Any] = []

    def post(self, request: Request) -> Response:
        sent = request.data if "look" in request.GET else None
        Effect.objects.create(reference="a")
        return Response({"sent": sent}, status=201)


def looks(request: HttpRequest) -> HttpResponse:
    sent = request.POST.dict() if "look" in request.GET else None
    Effect.objects.create(reference="a")
    return JsonResponse({"sent": sent}, status=201)


class Claims(BaseAuthentication):
    """Knows callers who are no models, and the claims of their tokens."""

    def authenticate(self, request: Request) -> Any:
        name = request.headers["Authorization"]
        user = SimpleNamespace(is_authenticated=name != "nobody", name=name, id=1)
        return user, {"sub": name}


class WithClaims(IdempotentViewMixin, APIView):
    authentication_classes = [Claims]

    def post(self, request: Request) -> Response:
        Effect.objects.create(reference="a")
        return Response({"for": request.user.name}, status=201)


class Named(WithClaims):
    idempotency_policy = Policy(principal=lambda call: f"claims:{call.request.user.name}")


BROKEN = {
    "malformed": (b"{", "application/json"),
    "a space": (b" ", "application/json"),
    "NUL": (b"\0", "application/json"),
    "deep": (b"[" * 100_000, "application/json"),
    "charset": (b"a=1", "application/x-www-form-urlencoded; charset=rot13"),
}

urlpatterns = [
    path("looks/", Looks.as_view()),
    path("plain-looks/", idempotent(looks)),
    path("metrics/", Metrics.as_view()),
    path("payments/", Payments.as_view()),
    path("outside/", LoopOutside.as_view()),
    path("inside/", LoopInside.as_view()),
    path("claims/", WithClaims.as_view()),
    path("named/", Named.as_view()),
    path("admin/", admin.site.urls),
]


@pytest.fixture
def _middleware(settings: Any) -> None:
    settings.MIDDLEWARE = [
        *django_settings.MIDDLEWARE,
        "idempotency_django.middleware.IdempotencyMiddleware",
    ]


@pytest.mark.usefixtures("_middleware")
class TestExemptions:
    def test_base(self, client: Client) -> None:
        """A class that is exempt takes no part."""
        key = new_key()
        assert [is_replay(post(client, "/metrics/", key)) for _ in range(2)] == [False, False]
        assert effects() == 2

    def test_subclass(self, client: Client) -> None:
        """What is made of it does, by its own policy."""
        key = new_key()
        assert_replays(post(client, "/payments/", key), post(client, "/payments/", key))
        assert_problem(post(client, "/payments/"), 400, "key-missing")
        assert effects() == 1


@pytest.mark.parametrize("url", ["/outside/", "/inside/"])
class TestLoopAroundDispatch:
    def test_with_key(self, client: Client, url: str) -> None:
        """The second run has a claim of its own; the effect of the first was rolled back."""
        key = new_key()
        first = post(client, url, key)
        assert first.status_code == 201
        assert_replays(first, post(client, url, key))
        assert effects() == 1

    def test_without_key(self, client: Client, url: str) -> None:
        """Without a key the loop runs the view again as ever."""
        assert post(client, url).status_code == 201
        assert effects() == 2


class TestCallersThatAreNoModels:
    def test_named_by_the_policy(self, client: Client) -> None:
        """A policy names users without a primary key, and a refreshed token is theirs."""
        key = new_key()
        first = post(client, "/named/", key, headers={"Authorization": "alice"})
        assert_replays(first, post(client, "/named/", key, headers={"Authorization": "alice"}))
        other = post(client, "/named/", key, headers={"Authorization": "bob"})
        assert (other.status_code, other.json()) == (201, {"for": "bob"})
        assert effects() == 2

    def test_not_named(self, client: Client) -> None:
        """Else the error says what names them; nothing is executed."""
        with pytest.raises(ImproperlyConfigured, match="principal="):
            post(client, "/claims/", new_key(), headers={"Authorization": "alice"})
        assert effects() == 0

    def test_claims(self, client: Client) -> None:
        """Claims name nobody, so the credentials count."""
        key = new_key()
        first = post(client, "/claims/", key, headers={"Authorization": "nobody"})
        assert_replays(first, post(client, "/claims/", key, headers={"Authorization": "nobody"}))
        assert effects() == 1


@pytest.mark.usefixtures("_middleware")
def test_admin_form(client: Client) -> None:
    """The admin's page of errors leaves the key free for the corrected form."""
    client.force_login(User.objects.create_superuser("root"))
    key = new_key()

    def add(name: str) -> HttpResponse:
        headers = {"Idempotency-Key": key}
        return client.post("/admin/auth/group/add/", {"name": name}, headers=headers)

    assert add("").status_code == 200
    first = add("team")
    assert first.status_code == 302
    assert is_replay(add("team"))
    assert Group.objects.filter(name="team").count() == 1


@pytest.mark.parametrize("url", ["/looks/", "/plain-looks/"])
class TestBrokenBodies:
    """A body that cannot be parsed is compared byte for byte."""

    @pytest.mark.parametrize("kind", BROKEN)
    def test_not_looked_at(self, client: Client, url: str, kind: str) -> None:
        """A view that does not look at its body responds as it does without a key."""
        body, media_type = BROKEN[kind]
        key = new_key()

        def send(content: bytes = body) -> HttpResponse:
            headers = {"Idempotency-Key": key}
            return client.generic("POST", url, content, media_type, headers=headers)

        first = send()
        assert first.status_code == 201
        assert_replays(first, send())
        assert_problem(send(body + b" "), 422, "mismatch")
        assert effects() == 1

    @pytest.mark.parametrize("kind", [kind for kind in BROKEN if kind != "charset"])
    def test_looked_at(self, client: Client, url: str, kind: str) -> None:
        """One that does meets what it meets without a key; nothing is stored."""
        body, media_type = BROKEN[kind]
        client.raise_request_exception = False
        responses = [
            client.generic("POST", f"{url}?look", body, media_type, headers=headers)
            for headers in ({}, {"Idempotency-Key": new_key()})
        ]
        assert responses[0].status_code == responses[1].status_code
        assert effects() == sum(response.status_code == 201 for response in responses)
