"""How many hops a first request makes inside the package: each is a cost to who reads the code.

A frame is a call of a function of the package, or a generator of it that goes on. A change of file
is one between two frames, in the order in which they begin. Each view has answered one request
before, so that what is kept of a view is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

import idempotency_django
from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.functions import idempotent_call
from tests.support import new_key, post

PACKAGE = Path(idempotency_django.__file__).parent
MIDDLEWARE = [*django_settings.MIDDLEWARE, "idempotency_django.middleware.IdempotencyMiddleware"]

BUDGET = {
    "drf": (70, 35),
    "decorator": (59, 32),
    "middleware": (65, 36),
    "idempotent_call": (38, 21),
}
"""The most frames, and changes of file. They can only fall.

The aim for idempotent_call is 18 changes of file.
"""

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.urls(__name__),
    pytest.mark.skipif("sqlite" not in django_settings.ALIASES, reason="counted on SQLite"),
]


class Charges(IdempotentViewMixin, APIView):
    """A DRF view with everything by default."""

    def post(self, request: Request) -> Response:
        return Response({"reference": request.data["reference"]}, status=201)


def plain(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"reference": json.loads(request.body)["reference"]}, status=201)


urlpatterns = [
    path("drf/", Charges.as_view()),
    path("decorator/", idempotent(plain)),
    path("middleware/", plain),
]


@pytest.fixture
def client(settings: Any) -> Client:
    """Somebody who is logged in, and the records on SQLite."""
    options = {"using": django_settings.ALIASES["sqlite"]}
    backend = "idempotency_django.stores.database.DatabaseStore"
    settings.IDEMPOTENCY = {"STORES": {"default": {"BACKEND": backend, "OPTIONS": options}}}
    client = Client()
    client.force_login(User.objects.create(username="alice"))
    return client


def files_of_frames(first: Callable[[], object]) -> list[str]:
    """The files of the package's frames, in the order in which these begin."""
    files: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and PACKAGE in Path(frame.f_code.co_filename).parents:
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        first()
    finally:
        sys.setprofile(None)
    return files


def assert_within_budget(way: str, first: Callable[[], object]) -> None:
    """A first request, other than the very first one, takes no more than it may."""
    first()
    files = files_of_frames(first)
    changes = sum(one != other for one, other in pairwise(files))
    frames_allowed, changes_allowed = BUDGET[way]
    print(f"{way}: {len(files)} frames, {changes} changes of file")
    assert 0 < len(files) <= frames_allowed
    assert changes <= changes_allowed


@pytest.mark.parametrize("way", ["drf", "decorator", "middleware"])
def test_request(client: Client, settings: Any, way: str) -> None:
    """A first request makes no more hops than its way to protect a view may."""
    if way == "middleware":
        settings.MIDDLEWARE = MIDDLEWARE

    def first() -> None:
        assert post(client, f"/{way}/", new_key()).status_code == 201

    assert_within_budget(way, first)


def test_idempotent_call(client: Client) -> None:
    """Nor does a call of plain Python."""

    def first() -> None:
        assert idempotent_call(key=new_key(), scope="payments", fn=lambda execution: 17) == 17

    assert_within_budget("idempotent_call", first)
