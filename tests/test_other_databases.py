"""``ATOMIC_REQUESTS`` on a database that is not the store's: no answer before its effects."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, connections
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path
from rest_framework.authtoken.models import Token
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.models import IdempotencyKey
from tests.models import Effect
from tests.support import assert_replays, effects, new_key, post, record

# One whose foreign keys are checked at COMMIT, so that a view can make a commit fail.
OTHER = next(
    (
        settings.ALIASES[name]
        for name in ("sqlite", "postgres")
        if settings.ALIASES.get(name, "default") != "default"
    ),
    None,
)

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.urls(__name__),
    pytest.mark.skipif(OTHER is None, reason="one database only"),
]


def write(reference: str) -> None:
    """An effect on the other database, and maybe one that cannot be committed there."""
    Effect.objects.using(OTHER).create(reference=reference)
    if reference == "dangling":
        Token.objects.using(OTHER).create(key="dangling", user_id=1_000_000)


def create(request: HttpRequest) -> HttpResponse:
    reference = json.loads(request.body)["reference"]
    write(reference)
    return JsonResponse({"reference": reference}, status=503 if reference == "503" else 201)


class DRF(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []

    def post(self, request: Request) -> Response:
        write(request.data["reference"])
        return Response({}, status=201)


class OnlyItsHandler(APIView):
    """Django's own transaction is around this one."""

    authentication_classes: ClassVar[list[Any]] = []

    @idempotent
    def post(self, request: Request) -> Response:
        write(request.data["reference"])
        return Response({}, status=201)


class OnlyItsLeasedHandler(OnlyItsHandler):
    @idempotent(mode="leased")
    def post(self, request: Request) -> Response:
        write(request.data["reference"])
        return Response({}, status=201)


def hides_marks(request: HttpRequest) -> HttpResponse:
    return DRF.as_view()(request)


def calls(request: HttpRequest) -> HttpResponse:
    """A view without protection, in which a function has it."""

    def fn(execution: ExecutionContext) -> None:
        write("a")

    idempotent_call(fn, key="call", scope="calls")
    raise InterruptedError


urlpatterns = [
    path("calls/", calls),
    path("decorated/", idempotent(create)),
    path("leased/", idempotent(mode="leased")(create)),
    path("drf/", DRF.as_view()),
    path("handler/", OnlyItsHandler.as_view()),
    path("leased-handler/", OnlyItsLeasedHandler.as_view()),
    path("hidden/", hides_marks),
]


@pytest.fixture(autouse=True)
def _atomic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings[OTHER], "ATOMIC_REQUESTS", True)


def effects_there(reference: str) -> int:
    return Effect.objects.using(OTHER).filter(reference=reference).count()


VIEWS = ["/decorated/", "/leased/", "/drf/"]


@pytest.mark.parametrize("both", [False, True], ids=["other database", "both databases"])
@pytest.mark.parametrize("url", VIEWS)
class TestCommits:
    """What is committed, and in which order."""

    @pytest.fixture(autouse=True)
    def _both(self, both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", both)

    def test_replay(self, client: Client, url: str) -> None:
        """One effect, and the same answer again."""
        key = new_key()
        first = post(client, url, key)
        assert first.status_code == 201
        assert_replays(first, post(client, url, key))
        assert effects_there("a") == 1

    def test_commit_that_fails(self, client: Client, url: str) -> None:
        """An answer whose effects could not be committed is not stored."""
        key = new_key()
        for attempt in (1, 2):
            with pytest.raises(IntegrityError):
                post(client, url, key, "dangling")
            assert effects_there("dangling") == 0
            assert (record(key).status, record(key).attempt) == ("failed", attempt)


def test_returned_5xx(client: Client) -> None:
    """A 5xx rolls back all databases."""
    assert post(client, "/decorated/", new_key(), "503").status_code == 503
    assert effects_there("503") == 0


@pytest.mark.parametrize("url", ["/handler/", "/leased-handler/"])
def test_transaction_that_is_djangos(client: Client, url: str) -> None:
    """Where Django's own transaction is around a handler, its answer would commit first."""
    with pytest.raises(ImproperlyConfigured, match="ATOMIC_REQUESTS"):
        post(client, url, new_key())
    assert effects_there("a") == 0
    assert not IdempotencyKey.objects.exists()


def test_call_within_a_request(client: Client) -> None:
    """So it would where a function is protected in such a view."""
    with pytest.raises(ImproperlyConfigured, match="ATOMIC_REQUESTS"):
        post(client, "/calls/")
    assert not IdempotencyKey.objects.exists()


def test_transactions_that_are_djangos(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it would where Django's are around all of it, on the store's database as well."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    with pytest.raises(ImproperlyConfigured, match="ATOMIC_REQUESTS"):
        post(client, "/hidden/", new_key())
    assert (effects(), effects_there("a")) == (0, 0)
