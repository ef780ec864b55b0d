"""A view whose key is optional: what it finds when no key came."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy
from tests.support.shared import new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


def found(request: Any) -> HttpResponse:
    return HttpResponse(repr(request.idempotency), status=201)


async def asynchronous(request: Any) -> HttpResponse:
    return found(request)


def nested(request: HttpRequest) -> HttpResponse:
    """Calls another protected view."""
    return idempotent(found)(request)  # type: ignore[no-any-return]


class DRF(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []
    idempotency_policy = Policy(mode="leased")

    def post(self, request: Request) -> Response:
        return Response(found(request).content.decode(), status=201)


urlpatterns = [
    path("transactional/", idempotent(found)),
    path("leased/", idempotent(mode="leased")(found)),
    path("drf/", DRF.as_view()),
    path("async/", idempotent(asynchronous)),
    path("twice/", idempotent(mode="leased")(nested)),
]


@pytest.mark.parametrize("url", ["/transactional/", "/leased/", "/drf/", "/async/"])
def test_none_without_a_key(client: Client, url: str) -> None:
    """A view can ask whether there is a key, in each mode."""
    assert post(client, url).content.strip(b'"') == b"None"
    assert b"attempt 1" in post(client, url, new_key()).content


def test_protected_twice(client: Client) -> None:
    """A protected view within another one runs, with a key and without."""
    for key in (None, new_key()):
        assert post(client, "/twice/", key).status_code == 201
