"""A loop around ``dispatch()``, which runs a view again that has failed."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import OperationalError
from django.test import Client
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.drf import IdempotentViewMixin
from tests.models import Effect
from tests.support.shared import assert_replays, effects, new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


class Deadlocked(APIView):
    """Fails in its first run and not in its second."""

    authentication_classes: list[Any] = []

    def post(self, request: Request) -> Response:
        Effect.objects.create(reference="a")
        if self.runs == 1:
            raise OperationalError("deadlock detected")
        return Response({}, status=201)


class Retries:
    """A loop around ``dispatch()``, as projects have one for deadlocks."""

    runs = 0

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.runs += 1
            return super().dispatch(*args, **kwargs)  # type: ignore[misc]
        except OperationalError:
            self.runs += 1
            return super().dispatch(*args, **kwargs)  # type: ignore[misc]


class LoopOutside(Retries, IdempotentViewMixin, Deadlocked):
    pass


class LoopInside(IdempotentViewMixin, Retries, Deadlocked):
    pass


urlpatterns = [
    path("outside/", LoopOutside.as_view()),
    path("inside/", LoopInside.as_view()),
]


@pytest.mark.parametrize("url", ["/outside/", "/inside/"])
class TestLoopAroundDispatch:
    def test_with_key(self, client: Client, url: str) -> None:
        """The second run has a claim of its own; the effect of the first was rolled back."""
        key = new_key()
        first = post(client, url, key)
        assert first.status_code == 201
        assert_replays(first, post(client, url, key))
        assert effects() == 1

    def test_without_key(self, client: Client, url: str) -> None:
        """Without a key the loop runs the view again as ever."""
        assert post(client, url).status_code == 201
        assert effects() == 2
