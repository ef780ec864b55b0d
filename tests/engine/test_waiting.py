"""``on_conflict="wait"`` under ``ATOMIC_REQUESTS``."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from django.db import connection, connections
from django.test import Client
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy
from idempotency_django.testing import in_threads
from idempotency_django.testing.contract import PATIENCE
from tests.models import Effect
from tests.support.shared import assert_replays, effects, new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


class Waits(IdempotentViewMixin, APIView):
    """A second request reads something before it waits for the first."""

    authentication_classes: ClassVar[list[Any]] = []
    idempotency_policy = Policy(on_conflict=timedelta(seconds=20))
    claimed: ClassVar[threading.Event]
    looked: ClassVar[threading.Event]

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        if "X-Second" in request.headers:
            assert self.claimed.wait(PATIENCE)
            assert not Effect.objects.exists()
            self.looked.set()

    def post(self, request: Request) -> Response:
        self.claimed.set()
        assert self.looked.wait(PATIENCE)
        Effect.objects.create(reference=request.data["reference"])
        return Response({}, status=201)


urlpatterns = [path("waits/", Waits.as_view())]


def test_waiter_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiter looks again and again in its own transaction, and gets the first's response."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLITE HAS ONE WRITE LOCK FOR ALL")
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    Waits.claimed, Waits.looked = threading.Event(), threading.Event()
    key = new_key()
    first, second = in_threads(
        [
            lambda: post(Client(), "/waits/", key),
            lambda: post(Client(), "/waits/", key, headers={"X-Second": "1"}),
        ]
    )
    assert first.status_code == 201
    assert_replays(first, second)
    assert effects() == 1
