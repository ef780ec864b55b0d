"""What protection costs: calls of Python functions, which are the same on every machine."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import User
from django.core.handlers.base import BaseHandler
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import RequestFactory
from django.urls import path
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django import idempotent
from idempotency_django.drf import IdempotentViewMixin
from tests.support.shared import is_replay, new_key

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
    pytest.mark.skipif(
        connection.vendor != "postgresql" or sys.modules.get("psycopg") is None,
        reason="the calls are those of PostgreSQL with psycopg 3",
    ),
]


def effect() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def bare(request: HttpRequest) -> HttpResponse:
    effect()
    return JsonResponse({"id": 1}, status=201)


class AsUser(BaseAuthentication):
    def authenticate(self, request: Request) -> Any:
        return request._request.user, None


class Bare(APIView):
    authentication_classes: ClassVar[Any] = [AsUser]

    def post(self, request: Request) -> Response:
        effect()
        return Response({"id": 1}, status=201)


class Protected(IdempotentViewMixin, Bare):
    pass


urlpatterns = [
    path("atomic/view/", transaction.atomic(bare)),
    path("protected/view/", idempotent(bare)),
    path("atomic/drf/", transaction.atomic(Bare.as_view())),
    path("protected/drf/", Protected.as_view()),
]


class Counted:
    """Requests, without middleware, and the calls of each: all of them, and the package's own."""

    def __init__(self, settings: Any) -> None:
        settings.MIDDLEWARE = []
        self.user = User.objects.create_user("alice")
        self.handler = BaseHandler()
        self.handler.load_middleware()

    def post(self, url: str, key: str = "") -> tuple[Any, int, int]:
        body, headers = json.dumps({"amount": 1}), {"Idempotency-Key": f'"{key}"'} if key else {}
        request = RequestFactory().post(url, body, "application/json", headers=headers)
        request.user = self.user
        calls: Counter[bool] = Counter()

        def count(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                calls[frame.f_globals.get("__name__", "").startswith("idempotency_django.")] += 1

        sys.setprofile(count)
        try:
            response = self.handler.get_response(request)
        finally:
            sys.setprofile(None)
        assert response.status_code == 201
        return response, calls.total(), calls[True]


@pytest.mark.parametrize(
    ("kind", "more", "own", "replay"), [("view", 292, 97, 427), ("drf", 316, 109, 622)]
)
def test_calls(settings: Any, kind: str, more: int, own: int, replay: int) -> None:
    """A first request makes so many calls more than the same view in a transaction, and a replay so
    many in all. Whoever raises a number says in the commit what it buys.
    """
    counted = Counted(settings)
    for key in ("", new_key()):  # what is looked up once
        for kept in ("atomic", "protected", "protected"):
            counted.post(f"/{kept}/{kind}/", key)
    key = new_key()
    _, atomic, _ = counted.post(f"/atomic/{kind}/")
    first, calls, ours = counted.post(f"/protected/{kind}/", key)
    assert not is_replay(first)
    assert calls - atomic <= more, calls - atomic
    assert ours <= own, ours
    again, calls, _ = counted.post(f"/protected/{kind}/", key)
    assert is_replay(again)
    assert calls <= replay, calls
