"""Bodies that cannot be parsed, before views that look at them and before others."""

from __future__ import annotations

from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from tests.models import Effect
from tests.support.shared import assert_problem, assert_replays, effects, new_key

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


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
]


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
