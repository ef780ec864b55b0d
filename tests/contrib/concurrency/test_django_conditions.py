"""Django's own conditional decorators: a retry meets them first, so a check warns of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from django.utils.decorators import method_decorator
from django.utils.http import http_date
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import condition, etag, last_modified, require_safe
from django.views.generic import View
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from tests.contrib.concurrency.models import Owner, Ticket

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


def tag(*args: Any, **kwargs: Any) -> str:
    return f'"{Ticket.objects.get().version}"'


def edited_at(version: int) -> datetime:
    return datetime(1994, 10, 29, 19, 43, version, tzinfo=UTC)


def edited(*args: Any, **kwargs: Any) -> datetime:
    return edited_at(Ticket.objects.get().version)


def change() -> None:
    Owner.objects.create(name=None)
    Ticket.objects.get().save()


def view(request: HttpRequest) -> HttpResponse:
    change()
    return HttpResponse("changed", "text/plain")


def api(request: Any) -> Response:
    change()
    return Response("changed")


class Handled(View):
    @method_decorator(etag(tag))
    @idempotent
    def put(self, request: HttpRequest) -> HttpResponse:
        return view(request)


@method_decorator([never_cache, etag(tag)], name="dispatch")
class Dispatched(View):
    @idempotent
    def put(self, request: HttpRequest) -> HttpResponse:
        return view(request)


class Unmarked(View):
    def put(self, request: HttpRequest) -> HttpResponse:
        return view(request)


@method_decorator(etag(tag), name="dispatch")
class Mixed(IdempotentViewMixin, APIView):
    authentication_classes: Any = []

    def put(self, request: Any) -> Response:
        return api(request)


BAD = {
    "above": etag(tag)(idempotent(view)),
    "last_modified_above": last_modified(edited)(idempotent(view)),
    "around": never_cache(etag(tag)(idempotent(never_cache(view)))),
    "handler": Handled.as_view(),
    "as_view": etag(tag)(Handled.as_view()),
    "dispatch": Dispatched.as_view(),
    "mixin": Mixed.as_view(),
    "middleware_around": etag(tag)(Unmarked.as_view()),
}
READ = {
    "read": require_safe(etag(tag)(never_cache(view))),
    "read_inside": etag(tag)(never_cache(require_safe(view))),
}
urlpatterns = [path(f"{name}/", csrf_exempt(found)) for name, found in {**BAD, **READ}.items()]


@pytest.fixture(autouse=True)
def _middleware(settings: Any) -> None:
    settings.MIDDLEWARE = ["idempotency_django.middleware.IdempotencyMiddleware"]


@pytest.fixture(autouse=True)
def ticket() -> Ticket:
    return Ticket.objects.create()


def put(name: str, key: str, version: int = 1) -> Any:
    headers = {"Idempotency-Key": key, "If-Match": f'"{version}"'}
    if name.startswith("last"):
        headers["If-Unmodified-Since"] = http_date(edited_at(version).timestamp())
        del headers["If-Match"]
    client = Client(raise_request_exception=False)
    return client.put(f"/{name}/", headers=headers)


@pytest.mark.parametrize("decorator", [etag(tag), last_modified(edited), condition(tag, edited)])
def test_below(decorator: Any) -> None:
    """Below ``@idempotent`` they are refused: what they look up may depend on the caller."""
    for decorated in (decorator(view), never_cache(decorator(view)), decorator(never_cache(view))):
        with pytest.raises(ImproperlyConfigured, match=r"condition\(\) .*Put @idempotent below it"):
            idempotent(decorated)


@pytest.mark.parametrize("name", BAD)
def test_too_early(name: str) -> None:
    """Above it, a condition handles the retry."""
    key = str(uuid4())
    assert [put(name, key).status_code for _ in range(2)] == [200, 412]
    assert Owner.objects.count() == 1
