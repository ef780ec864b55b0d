"""``ATOMIC_REQUESTS`` wherever ``@idempotent`` is put: a response never outlives its effects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from django.contrib.admin.models import ADDITION, LogEntry
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.views.generic import View
from rest_framework.decorators import api_view, authentication_classes, permission_classes
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.engine.functions import idempotent_call
from tests.models import Effect
from tests.support.shared import assert_replays, effects, new_key

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

Decorator = Callable[[Any], Any]


def work(reference: str) -> None:
    """Do it, in a way that the database may refuse at COMMIT, or fail."""
    Effect.objects.create(reference=reference)
    if reference == "dangling":
        LogEntry.objects.create(user_id=10**6, action_flag=ADDITION)
    if reference == "raise":
        raise LookupError("boom")


def django_view(request: HttpRequest) -> HttpResponse:
    work(request.headers["X-Reference"])
    return JsonResponse({}, status=201)


def drf_view(request: Request) -> Response:
    work(request.headers["X-Reference"])
    return Response({}, status=201)


class Plain(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return django_view(request)


class PlainDRF(APIView):
    authentication_classes: ClassVar[list[Any]] = []
    permission_classes: ClassVar[list[Any]] = []

    def post(self, request: Request) -> Response:
        return drf_view(request)


def on_the_view(once: Decorator) -> Iterator[tuple[str, Any]]:
    """Where the decorator knows the view that the URL leads to."""
    yield "function", once(django_view)


def on_a_part(once: Decorator) -> Iterator[tuple[str, Any]]:
    """Where it knows a part of it only; Django's own transaction is around that."""

    class Method(View):
        @once
        def post(self, request: HttpRequest) -> HttpResponse:
            return django_view(request)

    class MethodDRF(PlainDRF):
        @once
        def post(self, request: Request) -> Response:
            return drf_view(request)

    yield "method", Method.as_view()
    yield "drf-method", MethodDRF.as_view()
    yield "below-api-view", _api_view(once(drf_view))


def _api_view(view: Any) -> Any:
    return api_view(["POST"])(authentication_classes([])(permission_classes([])(view)))


class AsyncView(View):
    @idempotent
    async def post(self, request: HttpRequest) -> HttpResponse:
        return JsonResponse({})


KINDS = {"auto": "auto", "leased": "leased", "memory": "auto"}
"""What is tried, and the mode of its policy; "memory" is a store that takes part in nothing."""

urlpatterns = [
    path(f"{kind}/{name}/", view)
    for kind, mode in KINDS.items()
    for places in (on_the_view, on_a_part)
    for name, view in places(idempotent(mode=mode))
]
urlpatterns += [
    path("async/handler/", AsyncView.as_view()),
]

ON_THE_VIEW = [name for name, _ in on_the_view(lambda view: view)]
ON_A_PART = [name for name, _ in on_a_part(lambda view: view)]


@pytest.fixture
def kind() -> str:
    """What is tried where a test does not say."""
    return "auto"


@pytest.fixture(autouse=True)
def _atomic_requests(monkeypatch: pytest.MonkeyPatch, settings: Any, kind: str) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    if kind == "memory":
        backend = "idempotency_django.stores.memory.MemoryStore"
        settings.IDEMPOTENCY = {"STORES": {"default": {"BACKEND": backend}}}


def send(client: Client, url: str, key: str, reference: str) -> Any:
    return client.post(
        url,
        {"reference": "a"},
        content_type="application/json",
        headers={"Idempotency-Key": key, "X-Reference": reference},
    )


@pytest.mark.parametrize("name", [*ON_THE_VIEW, *ON_A_PART])
class TestPlacements:
    """Wherever the decorator is, the operation is a part of the request's transaction."""

    def test_replay(self, client: Client, name: str) -> None:
        """One effect, and its response again."""
        key = new_key()
        first = send(client, f"/auto/{name}/", key, "a")
        assert_replays(first, send(client, f"/auto/{name}/", key, "a"))
        assert effects("a") == 1

    @pytest.mark.parametrize("reference", ["raise", "dangling"])
    def test_failure(self, client: Client, name: str, reference: str) -> None:
        """What the view raises, and what is refused at COMMIT, leaves nothing; a retry is
        executed.
        """
        key = new_key()
        with pytest.raises((LookupError, IntegrityError)):
            send(client, f"/auto/{name}/", key, reference)
        assert effects(reference) == 0
        assert send(client, f"/auto/{name}/", key, "a").status_code == 201
        assert effects("a") == 1

    def test_without_a_key(self, client: Client, name: str) -> None:
        """What takes no part is in the transaction that Django opens."""
        headers = {"X-Reference": "raise"}
        with pytest.raises(LookupError):
            client.post(f"/auto/{name}/", {}, content_type="application/json", headers=headers)
        assert effects("raise") == 0

    @pytest.mark.parametrize("kind", ["leased", "memory"])
    def test_response_that_would_not_roll_back(self, client: Client, kind: str, name: str) -> None:
        """What commits by itself is refused before the view runs, with a way out."""
        with pytest.raises(ImproperlyConfigured, match="If it is ATOMIC_REQUESTS,"):
            send(client, f"/{kind}/{name}/", new_key(), "a")
        assert effects("a") == 0


@pytest.mark.parametrize("kind", ["memory"])
def test_call_within_a_transaction(kind: str) -> None:
    """A plain call whose store takes no part in the transaction around it is refused."""
    calls: list[int] = []
    with transaction.atomic(), pytest.raises(ImproperlyConfigured, match="move it inside"):
        idempotent_call(lambda _: calls.append(1), key="order-1", scope="s")
    assert calls == []


@pytest.mark.parametrize("url", ["/async/handler/"])
def test_async(url: str) -> None:
    """Django refuses a transaction around an async view, wherever the decorator is."""
    request = AsyncClient().post(url, headers={"Idempotency-Key": new_key()})
    with pytest.raises(RuntimeError, match="cannot use ATOMIC_REQUESTS with async views"):
        asyncio.run(request)
