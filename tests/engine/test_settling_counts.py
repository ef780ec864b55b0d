"""What is written down after a rollback, when somebody else has completed the operation since."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from django.test import Client
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.testing import in_threads
from tests.models import Effect
from tests.support.shared import assert_replays, effects, is_replay, new_key, post, record

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
    pytest.mark.driver,
]


class Fails(IdempotentViewMixin, APIView):
    """Its first attempt fails, and before that is written down, a retry succeeds."""

    authentication_classes: ClassVar[list[Any]] = []
    retried: ClassVar[list[Any]]

    def post(self, request: Request) -> Response:
        Effect.objects.create(reference="a")
        if "X-Fails" in request.headers:
            raise InterruptedError
        return Response({}, status=201)

    def handle_exception(self, exc: Exception) -> Response:
        key = str(self.request.headers["Idempotency-Key"]).strip('"')  # type: ignore[attr-defined]
        self.retried += in_threads([lambda: post(Client(), "/fails/", key)])
        return Response({}, status=500)


urlpatterns = [path("fails/", Fails.as_view())]


def test_no_replay_is_counted(client: Client) -> None:
    """Nobody got a replay, so none is counted; the next one is."""
    Fails.retried = []
    key = new_key()
    assert post(client, "/fails/", key, headers={"X-Fails": "1"}).status_code == 500
    [retried] = Fails.retried
    assert retried.status_code == 201
    assert not is_replay(retried)
    assert effects() == 1
    assert record(key).replay_count == 0
    assert_replays(retried, post(client, "/fails/", key))
    assert record(key).replay_count == 1
