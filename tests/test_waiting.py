"""``on_conflict="wait"`` under ``ATOMIC_REQUESTS``: whoever waits holds nothing."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from django.db import connection, connections
from django.test import Client
from django.urls import path
from django.utils.module_loading import import_string
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy
from idempotency_django.testing import in_threads
from idempotency_django.testing.contract import PATIENCE
from tests.models import Effect
from tests.support import assert_replays, effects, new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


class Waits(IdempotentViewMixin, APIView):
    """Its throttle counts in a row, which its handler writes to as well."""

    authentication_classes: ClassVar[list[Any]] = []
    idempotency_policy = Policy(on_conflict=timedelta(seconds=20))
    claimed: ClassVar[threading.Event]
    counted: ClassVar[threading.Event]

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        if "X-Second" in request.headers:
            assert self.claimed.wait(PATIENCE)
            throttle = Effect.objects.filter(reference="throttle")
            if request.headers["X-Second"] == "writes":
                throttle.update(reference="throttle")
            assert throttle.exists()
            self.counted.set()

    def post(self, request: Request) -> Response:
        self.claimed.set()
        assert self.counted.wait(PATIENCE)
        Effect.objects.filter(reference="throttle").update(reference="throttle")
        Effect.objects.create(reference=request.data["reference"])
        return Response({}, status=201)


urlpatterns = [path("waits/", Waits.as_view())]


def isolation_level(name: str) -> object:
    """What Django's database backend calls the level."""
    if connection.vendor == "mysql":
        return name
    levels = import_string("django.db.backends.postgresql.psycopg_any.IsolationLevel")
    return levels[name.replace(" ", "_").upper()]


@pytest.mark.parametrize(
    ("level", "before"), [("read committed", "writes"), ("repeatable read", "reads")]
)
def test_waiter_holds_nothing(level: str, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first can write what the waiter wrote before it waited; the waiter gets its response.

    Under REPEATABLE READ too, where a transaction of the waiter's would go on seeing the past.
    """
    if connection.vendor == "sqlite":
        pytest.skip("SQLITE HAS ONE WRITE LOCK FOR ALL")
    options = {**connection.settings_dict["OPTIONS"], "isolation_level": isolation_level(level)}
    monkeypatch.setitem(connections.settings["default"], "OPTIONS", options)
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    Waits.claimed, Waits.counted = threading.Event(), threading.Event()
    Effect.objects.create(reference="throttle")
    key = new_key()
    first, second = in_threads(
        [
            lambda: post(Client(), "/waits/", key),
            lambda: post(Client(), "/waits/", key, headers={"X-Second": before}),
        ]
    )
    assert first.status_code == 201
    assert_replays(first, second)
    assert effects() == 1
