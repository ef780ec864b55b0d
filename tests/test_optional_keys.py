"""A leased view whose key is optional: what it finds when no key came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.support import effects, new_key, post

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

USES: dict[str, Callable[[Any], Any]] = {
    "step": lambda execution: execution.step("charge", dict),
    "astep": lambda execution: execution.astep("charge", dict),
    "derive_key": lambda execution: execution.derive_key("charge"),
    "key": lambda execution: execution.key,
    "attempt": lambda execution: execution.attempt,
}


def atomically(execution: Any) -> None:
    """Begins a transaction, and rolls it back."""
    with pytest.raises(LookupError), execution.atomic():
        assert connection.in_atomic_block
        Effect.objects.create(reference="b")
        raise LookupError


def leased(request: Any) -> HttpResponse:
    used = request.headers.get("X-Use")
    Effect.objects.create(reference="a")
    if used == "atomic":
        atomically(request.idempotency)
    elif used:
        USES[used](request.idempotency)
    return HttpResponse(str(bool(request.idempotency)), status=201)


async def asynchronous(request: Any) -> HttpResponse:
    if used := request.headers.get("X-Use"):
        USES[used](request.idempotency)
    return HttpResponse(str(bool(request.idempotency)), status=201)


def nested(request: HttpRequest) -> HttpResponse:
    """Calls another protected view."""
    return idempotent(leased)(request)  # type: ignore[no-any-return]


class DRF(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []
    idempotency_policy = Policy(mode="leased")

    def post(self, request: Request) -> Response:
        return Response(leased(request).content.decode(), status=201)


@idempotent
def transactional(request: HttpRequest) -> HttpResponse:
    return HttpResponse(repr(request.idempotency))  # type: ignore[attr-defined]


urlpatterns = [
    path("leased/", idempotent(mode="leased")(leased)),
    path("drf/", DRF.as_view()),
    path("async/", idempotent(asynchronous)),
    path("transactional/", transactional),
    path("twice/", idempotent(mode="leased")(nested)),
]

VIEWS = ["/leased/", "/drf/", "/async/"]


@pytest.mark.parametrize("url", VIEWS)
def test_false_without_a_key(client: Client, url: str) -> None:
    """A view can ask whether there is a key."""
    assert b"False" in post(client, url).content
    assert b"True" in post(client, url, new_key()).content


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("url", VIEWS)
def test_what_needs_a_key_says_so(client: Client, url: str, use: str) -> None:
    """What needs a key names itself, what is missing, and what to do."""
    with pytest.raises(ImproperlyConfigured, match=f"idempotency.{use} needs an idempotency key"):
        post(client, url, headers={"X-Use": use})


@pytest.mark.parametrize("url", ["/leased/", "/drf/"])
def test_atomic(client: Client, url: str) -> None:
    """A transaction is one."""
    assert post(client, url, headers={"X-Use": "atomic"}).status_code == 201
    assert (effects("a"), effects("b")) == (1, 0)


def test_nothing_else_is_there(client: Client) -> None:
    """What an execution has not, this has not either, so that templates and copies do not fail."""
    request = post(client, "/leased/").wsgi_request  # type: ignore[attr-defined]
    assert not hasattr(request.idempotency, "nonsense")
    assert not hasattr(request.idempotency, "__deepcopy__")


def test_transactional(client: Client) -> None:
    """In the transactional mode it is None, as ever."""
    assert post(client, "/transactional/").content == b"None"


def test_protected_twice(client: Client) -> None:
    """A protected view within another one runs, with a key and without."""
    for key in (None, new_key()):
        assert post(client, "/twice/", key).status_code == 201
