"""``IdempotencyMiddleware``: every view of a project, without touching it."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
import wrapt
from asgiref.sync import iscoroutinefunction
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.core.handlers.base import BaseHandler
from django.core.handlers.exception import convert_exception_to_response
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory
from django.urls import path
from django.views.generic import View
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotency_exempt
from idempotency_django.middleware import IdempotencyMiddleware
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.support.shared import assert_problem, assert_replays, effects, is_replay, new_key, post
from tests.support.views import create

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

PATH = "idempotency_django.middleware.IdempotencyMiddleware"
MIDDLEWARE = [*django_settings.MIDDLEWARE, PATH]


@pytest.fixture(autouse=True)
def _middleware(settings: Any) -> None:
    settings.MIDDLEWARE = MIDDLEWARE


class FindsKey(APIView):
    """A view whose policy says where its key is."""

    authentication_classes: ClassVar[list[Any]] = []
    idempotency_policy = Policy(key=lambda call: call.request.data.get("id"))

    def post(self, request: Request) -> HttpResponse:
        Effect.objects.create(reference="a")
        return Response(status=201)


def plain(request: HttpRequest) -> HttpResponse:
    return create(request)


@idempotency_exempt
def exempt(request: HttpRequest) -> HttpResponse:
    return create(request)


def with_policy(request: HttpRequest) -> HttpResponse:
    return create(request)


with_policy.idempotency_policy = Policy(required=True)


class WithPolicy(View):
    idempotency_policy = Policy(required=True)

    def post(self, request: HttpRequest) -> HttpResponse:
        return create(request)


def wrong_policy(request: HttpRequest) -> HttpResponse:
    return create(request)


wrong_policy.idempotency_policy = {"required": True}


urlpatterns = [
    path("plain/", plain),
    path("finds-key/", FindsKey.as_view()),
    path("exempt/", exempt),
    path("with-policy/", with_policy),
    path("class-with-policy/", WithPolicy.as_view()),
    path("wrong-policy/", wrong_policy),
]


def test_own_key_without_the_mixin() -> None:
    """A view that says where its key is needs no mixin for it, and no header."""
    body, key = json.dumps({"id": new_key()}), {"content_type": "application/json"}
    first, retry = [Client().post("/finds-key/", body, **key) for _ in range(2)]
    assert first.status_code == 201
    assert is_replay(retry)
    assert effects() == 1
    assert Client().post("/finds-key/", "{}", **key).status_code == 201
    assert effects() == 2


class TestProtection:
    """What takes part, and how."""

    def test_exempt(self, client: Client) -> None:
        """An exempt view runs each time."""
        key = new_key()
        for _ in range(2):
            assert not is_replay(post(client, "/exempt/", key))
        assert effects() == 2

    @pytest.mark.parametrize("url", ["/with-policy/", "/class-with-policy/"])
    def test_policy_of_a_view(self, client: Client, url: str) -> None:
        """A view declares its policy in an attribute."""
        assert_problem(post(client, url), 400, "key-missing")
        key = new_key()
        assert_replays(post(client, url, key), post(client, url, key))
        assert effects() == 1

    def test_wrong_policy(self, client: Client) -> None:
        """A policy that is none is refused, by name."""
        with pytest.raises(ImproperlyConfigured, match="is a dict; it must be a Policy"):
            post(client, "/wrong-policy/", new_key())

    def test_opt_in(self, client: Client, settings: Any) -> None:
        """With ``MIDDLEWARE_PROTECTS`` set to ``with-policy`` only such views take part."""
        settings.IDEMPOTENCY = {"MIDDLEWARE_PROTECTS": "with-policy"}
        key = new_key()
        for _ in range(2):
            assert not is_replay(post(client, "/plain/", key))
        first = post(client, "/with-policy/", key)
        assert_replays(first, post(client, "/with-policy/", key))


def test_csrf() -> None:
    """A request without a CSRF token is refused before it is looked up."""
    client = Client(enforce_csrf_checks=True)
    key = new_key()
    assert post(client, "/plain/", key).status_code == 403
    assert not IdempotencyKey.objects.exists()


class HandlesErrors:
    """A middleware that turns an exception of the domain into a response."""

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self.get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse:
        return HttpResponse(f"handled {error}", status=418)


class ChecksViews(BaseHandler):
    """A handler of the project, which checks the caller of every view."""

    def make_view_atomic(self, view: Any) -> Any:
        def checked(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            if request.headers["X-Allowed"] != "yes":
                raise PermissionDenied
            return view(request, *args, **kwargs)

        return checked


class TestNeighbours:
    """Other middleware."""

    def test_process_exception(self, client: Client, settings: Any) -> None:
        """Others see what the view raised, after it was rolled back."""
        settings.MIDDLEWARE = [*MIDDLEWARE[:-1], f"{__name__}.HandlesErrors", PATH]
        key = new_key()
        for _ in range(2):
            response = post(client, "/plain/", key, "error")
            assert (response.status_code, response.content) == (418, b"handled boom")
        assert effects("error") == 0
        assert IdempotencyKey.objects.get().attempt == 2

    def test_check_of_a_handler(self, settings: Any) -> None:
        """What a project's own handler puts around views is around those that run here, too."""
        settings.MIDDLEWARE = [PATH]
        handler = ChecksViews()
        handler.load_middleware()
        key = new_key()

        def send(allowed: str) -> Any:
            headers = {"Idempotency-Key": key, "X-Allowed": allowed}
            request = RequestFactory().post(
                "/plain/", b'{"reference": "a"}', "application/json", headers=headers
            )
            return handler.get_response(request)

        assert send("yes").status_code == 201
        assert is_replay(send("yes"))
        assert send("no").status_code == 403
        assert effects() == 1

    def test_below_a_tracer(self) -> None:
        """What a tracer puts around Django's handler is no middleware."""

        def trace(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            return wrapped(*args, **kwargs)

        inner = convert_exception_to_response(BaseHandler()._get_response)
        assert IdempotencyMiddleware(wrapt.FunctionWrapper(inner, trace))


def test_is_a_coroutine_under_asgi() -> None:
    """Django sees which kind it is."""

    handler = BaseHandler()
    assert iscoroutinefunction(IdempotencyMiddleware(handler._get_response_async))
    assert not iscoroutinefunction(IdempotencyMiddleware(handler._get_response))
