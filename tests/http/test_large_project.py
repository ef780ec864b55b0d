"""A large API that adopts the package with a middleware, one prefix and six lines of settings.

It has what such projects have: viewsets, transactions of their own that must be outermost,
decorators and permission classes that ask who the caller is, and plugins with URLs of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.core.management import call_command
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import include, path
from django.views import View
from rest_framework import serializers
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import DefaultRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ModelViewSet

from idempotency_django import Policy
from tests.models import Effect
from tests.support.shared import assert_problem, new_key

pytestmark = pytest.mark.django_db(transaction=True)

MAY_SELL = "tests.add_effect"
PLUGINS = 20


class TeamPermission(BasePermission):
    """Asks for the caller's permission, as a project's own class does."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        return bool(request.user.has_perm(MAY_SELL))


def team_required(view: Callable[..., Any]) -> Callable[..., Any]:
    """Asks for the caller's permission, as a project's own decorator does."""

    @functools.wraps(view)
    def checked(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if not request.user.has_perm(MAY_SELL):
            raise PermissionDenied
        return view(request, *args, **kwargs)

    return checked


class EffectSerializer(serializers.ModelSerializer[Effect]):
    class Meta:
        model = Effect
        fields = ("id", "reference")


class OrderViewSet(ModelViewSet[Effect]):
    queryset = Effect.objects.order_by("pk")
    serializer_class = EffectSerializer
    permission_classes = (TeamPermission,)


class SettleView(APIView):
    """Its transaction must be the outermost one."""

    def post(self, request: Request) -> Response:
        with transaction.atomic(durable=True):
            effect = Effect.objects.create(reference=request.data["reference"])
        return Response({"id": effect.pk}, status=201)


class LeasedSettleView(SettleView):
    idempotency_policy = Policy(mode="leased")


class PluginView(View):
    """A plugin's view, in a module that the project does not know."""

    def post(self, request: HttpRequest) -> HttpResponse:
        effect = Effect.objects.create(reference=request.POST["reference"])
        return JsonResponse({"id": effect.pk}, status=201)


@team_required
def export(request: HttpRequest) -> HttpResponse:
    """A plugin's function behind the project's decorator."""
    effect = Effect.objects.create(reference=request.POST["reference"])
    return JsonResponse({"id": effect.pk}, status=201)


def contact(request: HttpRequest) -> HttpResponse:
    """A page outside of the API."""
    effect = Effect.objects.create(reference=request.POST["reference"])
    return JsonResponse({"id": effect.pk}, status=201)


def plugin_urls(number: int) -> Any:
    patterns = [path("sync/", PluginView.as_view()), path("export/", export)]
    return path(f"plugins/{number}/", include((patterns, f"plugin{number}")))


router = DefaultRouter()
router.register("orders", OrderViewSet)
urlpatterns = [
    path(
        "api/",
        include(
            [
                path("", include(router.urls)),
                path("settle/", SettleView.as_view()),
                path("leased-settle/", LeasedSettleView.as_view()),
                *(plugin_urls(number) for number in range(PLUGINS)),
            ]
        ),
    ),
    path("contact/", contact),
]


@pytest.fixture(autouse=True)
def _project(settings: Any) -> None:
    settings.ROOT_URLCONF = __name__
    settings.MIDDLEWARE = [
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
        "idempotency_django.middleware.IdempotencyMiddleware",
    ]
    settings.IDEMPOTENCY = {"MIDDLEWARE_PROTECTS": ["/api/"]}


@pytest.fixture
def seller(client: Client) -> Client:
    """A caller who may sell, until the permission is withdrawn."""
    user = User.objects.create_user("seller", password="seller")
    user.user_permissions.add(Permission.objects.get(codename="add_effect"))
    client.force_login(user)
    return client


def send(client: Client, where: str, key: str | None, reference: str = "a") -> Any:
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post(where, {"reference": reference}, headers=headers)


def test_it_starts() -> None:
    """``check`` says in one warning what cannot be protected, and how many views that is."""
    written = StringIO()
    call_command("check", stderr=written, stdout=written)
    [line] = [line for line in written.getvalue().splitlines() if "idempotency_django." in line]
    assert "W023" in line
    assert "cannot protect 1 view " in line  # the function, on 20 routes


@pytest.mark.parametrize("where", ["/api/orders/", "/api/leased-settle/", "/api/plugins/7/sync/"])
def test_protected(seller: Client, where: str) -> None:
    """Viewsets, leased views and plugins are protected without a line of their own."""
    key = new_key()
    first, retry = (send(seller, where, key) for _ in range(2))
    assert (first.status_code, retry.status_code) == (201, 201)
    assert retry.content == first.content
    assert retry["Idempotent-Replayed"] == "true"
    assert_problem(send(seller, where, key, "b"), 422, "mismatch")
    assert Effect.objects.count() == 1


def test_permission_withdrawn(seller: Client) -> None:
    """The project's own permission class is asked before a replay."""
    key = new_key()
    assert send(seller, "/api/orders/", key).status_code == 201
    User.objects.get().user_permissions.clear()
    assert send(seller, "/api/orders/", key).status_code == 403


def test_decorated(seller: Client) -> None:
    """Behind a decorator of the project, a request with a key is refused; without one, it runs."""
    assert_problem(send(seller, "/api/plugins/7/export/", new_key()), 400, "key-unsupported")
    assert not Effect.objects.exists()
    assert send(seller, "/api/plugins/7/export/", None).status_code == 201


def test_durable(seller: Client) -> None:
    """A transaction that must be the outermost one is refused before anything is written, with the
    sentence that names leased mode; without a key, the view runs as before.
    """
    with pytest.raises(ImproperlyConfigured, match="leased") as refused:
        send(seller, "/api/settle/", new_key())
    assert "durable" in str(refused.value)
    assert not Effect.objects.exists()
    assert send(seller, "/api/settle/", None).status_code == 201


def test_outside(seller: Client) -> None:
    """Outside of the prefix, a key changes nothing."""
    key = new_key()
    assert [send(seller, "/contact/", key).status_code for _ in range(2)] == [201, 201]
    assert Effect.objects.count() == 2
