"""Classes under the middleware: one made of an exempt one, and those of the admin."""

from __future__ import annotations

from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib import admin
from django.contrib.auth.models import Group, User
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path
from django.views.generic import View

from idempotency_django.decorators import idempotency_exempt
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.support.shared import assert_problem, assert_replays, effects, is_replay, new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


@idempotency_exempt
class Metrics(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        Effect.objects.create(reference="a")
        return JsonResponse({}, status=201)


class Payments(Metrics):
    idempotency_policy = Policy(required=True)


urlpatterns = [
    path("metrics/", Metrics.as_view()),
    path("payments/", Payments.as_view()),
    path("admin/", admin.site.urls),
]


@pytest.fixture
def _middleware(settings: Any) -> None:
    settings.MIDDLEWARE = [
        *django_settings.MIDDLEWARE,
        "idempotency_django.middleware.IdempotencyMiddleware",
    ]


@pytest.mark.usefixtures("_middleware")
class TestExemptions:
    def test_base(self, client: Client) -> None:
        """A class that is exempt takes no part."""
        key = new_key()
        assert [is_replay(post(client, "/metrics/", key)) for _ in range(2)] == [False, False]
        assert effects() == 2

    def test_subclass(self, client: Client) -> None:
        """What is made of it does, by its own policy."""
        key = new_key()
        assert_replays(post(client, "/payments/", key), post(client, "/payments/", key))
        assert_problem(post(client, "/payments/"), 400, "key-missing")
        assert effects() == 1


@pytest.mark.usefixtures("_middleware")
def test_admin_form(client: Client) -> None:
    """The admin's checks of its callers are around its views, so it takes no keys."""
    client.force_login(User.objects.create_superuser("root"))

    def add(**headers: str) -> HttpResponse:
        return client.post("/admin/auth/group/add/", {"name": "team"}, headers=headers)

    assert_problem(add(**{"Idempotency-Key": new_key()}), 400, "key-unsupported")
    assert Group.objects.count() == 0
    assert add().status_code == 302
    assert Group.objects.filter(name="team").count() == 1
