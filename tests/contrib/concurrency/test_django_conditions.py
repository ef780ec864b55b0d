"""Django's own conditional decorators: a retry gets its response first, or a check says why not."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from django.core.checks import run_checks
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from django.utils.decorators import method_decorator
from django.utils.http import http_date
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import condition, etag, last_modified, require_safe
from django.views.generic import View
from rest_framework.decorators import api_view
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores.records import Status
from tests.contrib.concurrency.models import Owner, Ticket
from tests.support.shared import assert_replays

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


async def asynchronous(request: HttpRequest) -> HttpResponse:
    await Owner.objects.acreate(name=None)
    ticket = await Ticket.objects.aget()
    await ticket.asave()
    return HttpResponse("changed", "text/plain")


def fixed(*args: Any, **kwargs: Any) -> str:
    """An ETag without a look at the database, which an async view cannot have."""
    return '"1"' if Fixed.current else '"2"'


class Fixed:
    current = True


def api(request: Any) -> Response:
    change()
    return Response("changed")


class Handled(View):
    @method_decorator(etag(tag))
    def put(self, request: HttpRequest) -> HttpResponse:
        return view(request)


@method_decorator([never_cache, etag(tag)], name="dispatch")
class Dispatched(View):
    def put(self, request: HttpRequest) -> HttpResponse:
        return view(request)


class Mixed(IdempotentViewMixin, APIView):
    authentication_classes: Any = []

    @method_decorator(condition(etag_func=tag))
    def put(self, request: Any) -> Response:
        return api(request)


GOOD = {
    "etag": idempotent(etag(tag)(view)),
    "last_modified": idempotent(last_modified(edited)(view)),
    "both": idempotent(condition(tag, edited)(view)),
    "twice": idempotent(etag(tag)(etag(tag)(view))),
    "around": never_cache(idempotent(never_cache(etag(tag)(view)))),
    "api": api_view(["PUT"])(idempotent(etag(tag)(api))),
    "above_api": idempotent(api_view(["PUT"])(etag(tag)(api))),
    "middleware": etag(tag)(view),
}
BAD = {
    "above": etag(tag)(idempotent(view)),
    "last_modified_above": last_modified(edited)(idempotent(view)),
    "between": idempotent(condition(tag, edited)(never_cache(view))),
    "middleware_around": etag(tag)(never_cache(view)),
    "handler": idempotent(Handled).as_view(),
    "as_view": etag(tag)(idempotent(Handled.as_view())),
    "dispatch": idempotent(Dispatched).as_view(),
    "mixin": Mixed.as_view(),
}
READ = {
    "read": require_safe(etag(tag)(never_cache(view))),
    "read_inside": etag(tag)(never_cache(require_safe(view))),
}
urlpatterns = [
    path(f"{name}/", csrf_exempt(found)) for name, found in {**GOOD, **BAD, **READ}.items()
] + [path("async/", csrf_exempt(idempotent(etag(fixed)(asynchronous))))]


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


@pytest.mark.parametrize("name", GOOD)
def test_replay(name: str) -> None:
    """On the function itself, a condition is asked after the record: a retry gets its response."""
    key = str(uuid4())
    first = put(name, key)
    assert first.status_code == 200
    assert_replays(first, put(name, key), "Expires")  # the second of never_cache
    assert put(name, str(uuid4())).status_code == 412
    assert Owner.objects.count() == 1


@pytest.mark.parametrize("name", GOOD)
def test_refusal_is_not_stored(name: str, ticket: Ticket) -> None:
    """A condition that does not hold frees the key, as a precondition of ours does."""
    ticket.save()
    key = str(uuid4())
    assert put(name, key).status_code == 412
    assert IdempotencyKey.objects.get().status == Status.FAILED
    assert put(name, key, version=2).status_code == 200
    assert Owner.objects.count() == 1


def test_async(monkeypatch: Any) -> None:
    """The same of an async view."""
    key = str(uuid4())
    first = put("async", key)
    assert first.status_code == 200
    monkeypatch.setattr(Fixed, "current", False)
    assert_replays(first, put("async", key))
    assert put("async", str(uuid4())).status_code == 412


@pytest.mark.parametrize("name", BAD)
def test_too_early(name: str) -> None:
    """Around anything else, a condition handles the retry: what the check warns of."""
    key = str(uuid4())
    assert [put(name, key).status_code for _ in range(2)] == [200, 412]
    assert Owner.objects.count() == 1


def test_check() -> None:
    """The check names these views, and no others; it points to what can be done."""
    warnings = [message for message in run_checks() if message.id == "idempotency_django.W056"]
    routes = {str(message.hint).split()[2].strip("/.") for message in warnings}
    assert routes == set(BAD)
    assert all("@preconditions" in str(message.hint) for message in warnings)
