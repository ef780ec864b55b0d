"""Callers whom authentication knows, and who are no rows of a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import Client
from django.urls import path
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.support.shared import assert_replays, effects, new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


class Claims(BaseAuthentication):
    """Knows callers who are no models, and the claims of their tokens."""

    def authenticate(self, request: Request) -> Any:
        name = request.headers["Authorization"]
        user = SimpleNamespace(is_authenticated=name != "nobody", name=name, id=1)
        return user, {"sub": name}


class WithClaims(IdempotentViewMixin, APIView):
    authentication_classes = [Claims]

    def post(self, request: Request) -> Response:
        Effect.objects.create(reference="a")
        return Response({"for": request.user.name}, status=201)


class Named(WithClaims):
    idempotency_policy = Policy(principal=lambda call: f"claims:{call.request.user.name}")


urlpatterns = [
    path("claims/", WithClaims.as_view()),
    path("named/", Named.as_view()),
]


class TestCallersThatAreNoModels:
    def test_named_by_the_policy(self, client: Client) -> None:
        """A policy names users without a primary key, and a refreshed token is theirs."""
        key = new_key()
        first = post(client, "/named/", key, headers={"Authorization": "alice"})
        assert_replays(first, post(client, "/named/", key, headers={"Authorization": "alice"}))
        other = post(client, "/named/", key, headers={"Authorization": "bob"})
        assert (other.status_code, other.json()) == (201, {"for": "bob"})
        assert effects() == 2

    def test_not_named(self, client: Client) -> None:
        """Else the error says what names them; nothing is executed."""
        with pytest.raises(ImproperlyConfigured, match="principal="):
            post(client, "/claims/", new_key(), headers={"Authorization": "alice"})
        assert effects() == 0

    def test_claims(self, client: Client) -> None:
        """Claims name nobody, so the credentials count."""
        key = new_key()
        first = post(client, "/claims/", key, headers={"Authorization": "nobody"})
        assert_replays(first, post(client, "/claims/", key, headers={"Authorization": "nobody"}))
        assert effects() == 1
