"""What a view cannot do within the transaction of its claim, and what it is told."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections, connection, connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.models import IdempotencyKey
from tests.models import Effect
from tests.support.shared import assert_replays, close_connections, effects, new_key, post, record

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
    pytest.mark.driver,
]


def durable() -> None:
    with transaction.atomic(durable=True):
        Effect.objects.create(reference="durable")


def isolation() -> None:
    if connection.vendor == "sqlite":
        pytest.skip("SQLITE HAS NO ISOLATION LEVELS")
    with connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")


def closes() -> None:
    close_connections(close_old_connections)


def closes_and_asks() -> None:
    closes()
    Effect.objects.count()


WAYS = {
    "durable": durable,
    "isolation": isolation,
    "autocommit": lambda: transaction.set_autocommit(False),
    "commit": transaction.commit,
    "closes": closes,
    "closes-and-asks": closes_and_asks,
}


def handle(reference: str) -> None:
    Effect.objects.create(reference="before")
    WAYS[reference]()


def create(request: HttpRequest) -> HttpResponse:
    handle(json.loads(request.body)["reference"])
    return JsonResponse({}, status=201)


class DRF(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []

    def post(self, request: Request) -> Response:
        handle(request.data["reference"])
        return Response({}, status=201)


def fails(request: HttpRequest) -> HttpResponse:
    """An error of the view's own."""
    raise RuntimeError("its own")


urlpatterns = [
    path("view/", idempotent(create)),
    path("drf/", DRF.as_view()),
    path("leased/", idempotent(mode="leased")(create)),
    path("fails/", idempotent(fails)),
]


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic requests", "no atomic requests"])
@pytest.mark.parametrize("url", ["/view/", "/drf/"])
@pytest.mark.parametrize("way", WAYS)
def test_refused(
    client: Client, url: str, way: str, atomic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the transaction and the way out; nothing was done, and the key is free."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)
    key = new_key()
    for attempt in (1, 2):
        with pytest.raises(ImproperlyConfigured, match=r"within a transaction, .*mode='leased'"):
            post(client, url, key, way)
        if atomic:  # the record of the attempt has gone with the request's transaction
            assert not IdempotencyKey.objects.exists()
        else:
            assert (record(key).status, record(key).attempt) == ("failed", attempt)
            assert "mode='leased'" in record(key).error
    assert effects("before") == effects("durable") == 0


@pytest.mark.parametrize("way", ["durable", "isolation", "closes", "closes-and-asks"])
def test_leased(client: Client, way: str) -> None:
    """In leased mode a view runs in no transaction, and may do all of this."""
    key = new_key()
    first = post(client, "/leased/", key, way)
    assert first.status_code == 201
    assert_replays(first, post(client, "/leased/", key, way))


def test_error_of_the_view(client: Client) -> None:
    """Any other error is what it is."""
    with pytest.raises(RuntimeError, match="its own"):
        post(client, "/fails/", new_key())
