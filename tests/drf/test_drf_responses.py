"""What REST framework's views return: of its own class, as the project's handler of errors says."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
from django.http import HttpResponse
from django.urls import path
from rest_framework import viewsets
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.schemas.openapi import AutoSchema
from rest_framework.test import APIClient
from rest_framework.views import APIView, exception_handler

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotencyAPIException, IdempotentViewMixin
from idempotency_django.engine import InProgress
from idempotency_django.http import IdempotencyStatusView
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.support.shared import assert_problem, assert_replays, new_key

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]


class Create(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []
    idempotency_policy = Policy(required=True)

    def post(self, request: Request) -> HttpResponse:
        Effect.objects.create(reference="a")
        return Response({"detail": "made"}, status=201, headers={"Location": "/a/"})


class Accepting(Create):
    # Not as an attribute, which the system checks of other tests would see without these URLs.
    def get_idempotency_policy(self) -> Policy:
        return Policy(mode="leased", on_conflict="accepted")


class Decorated(APIView):
    authentication_classes: ClassVar[list[Any]] = []

    @idempotent(required=True)
    def post(self, request: Request) -> Response:
        return Response({"detail": "made"}, status=201)


class Undocumented(IdempotentViewMixin, APIView):
    schema = AutoSchema()

    def post(self, request: Request) -> Response:
        return Response()


class Documented(IdempotentViewMixin, viewsets.ViewSet):
    """Charges of the shop."""

    schema = AutoSchema()
    permission_classes = [AllowAny]

    def create(self, request: Request) -> Response:
        return Response()


urlpatterns = [
    path("create/", Create.as_view()),
    path("accepting/", Accepting.as_view()),
    path("decorated/", Decorated.as_view()),
    path("operations/<str:token>/", IdempotencyStatusView.as_view(), name="idempotency-status"),
]


def send(url: str, key: str | None = None, **data: str) -> Any:
    headers = {"Idempotency-Key": key} if key else {}
    return APIClient().post(url, data, format="json", headers=headers)


@pytest.mark.parametrize("url", ["/create/", "/decorated/"])
def test_replay_has_data(url: str) -> None:
    """A replay is a Response, with what its bytes say in its data."""
    key = new_key()
    first, second = send(url, key), send(url, key)
    assert_replays(first, second)
    assert isinstance(second, Response)
    assert second.data == {"detail": "made"}
    assert second.status_text == first.status_text


@pytest.mark.parametrize("url", ["/create/", "/decorated/"])
def test_refusal_has_data(url: str) -> None:
    """A refusal is a Response, whose data are the members of the problem."""
    refused = send(url)
    problem = assert_problem(refused, 400, "key-missing")
    assert isinstance(refused, Response)
    assert refused.data == problem
    assert "requires the header" in refused.data["detail"]


def test_accepted_has_data(monkeypatch: Any) -> None:
    """So is the response to a duplicate of an operation in progress."""
    monkeypatch.setattr("idempotency_django.http.serving.run", lambda *_, **__: InProgress())
    accepted = send("/accepting/", new_key())
    assert accepted.status_code == 202
    assert isinstance(accepted, Response)
    assert accepted.data == {"status": "in_progress"}
    assert accepted["Location"].startswith("/operations/")
    assert accepted["Retry-After"] == "1"
    assert accepted["Cache-Control"] == "no-store"


def adds_headers(error: Exception, context: Any) -> Any:
    """Leaves the problem as it is, and adds to it."""
    response = exception_handler(error, context)
    if isinstance(error, IdempotencyAPIException):
        assert response is not None
        response["X-Request-Cost"] = "0"
        response.set_cookie("seen", "yes")
        response.status_code = 418
    return response


def says_it_otherwise(error: Exception, context: Any) -> Any:
    """Says the same in words of its own."""
    assert isinstance(error, IdempotencyAPIException)
    return Response({"code": error.error.slug}, status=499, headers={"X-Request-Cost": "0"})


def test_headers_of_exception_handler(settings: Any) -> None:
    """What the project's handler of errors adds to a refusal reaches the client."""
    settings.REST_FRAMEWORK = {"EXCEPTION_HANDLER": f"{__name__}.adds_headers"}
    refused = send("/create/")
    assert refused.status_code == 418
    assert refused["X-Request-Cost"] == "0"
    assert refused.cookies["seen"].value == "yes"
    assert refused["Content-Type"] == "application/problem+json"
    assert json.loads(refused.content)["type"].endswith("#key-missing")


def test_response_of_exception_handler(settings: Any) -> None:
    """A handler that makes a response of its own has the last word."""
    settings.REST_FRAMEWORK = {"EXCEPTION_HANDLER": f"{__name__}.says_it_otherwise"}
    refused = send("/create/")
    assert (refused.status_code, refused["X-Request-Cost"]) == (499, "0")
    assert refused.data == {"code": "key-missing"}
    assert refused["Content-Type"] == "application/json"


def test_descriptions_in_openapi() -> None:
    """What a view does is not what makes it safe to retry: the API's clients read of it."""

    def description(view: Any) -> str:
        return str(view.schema.get_description("/", "POST"))

    assert description(Undocumented()) == ""
    assert description(Documented(action="create")) == "Charges of the shop."


@pytest.mark.parametrize("view", [Undocumented, Create])
def test_no_docstring_to_inherit(view: Any) -> None:
    """No class above a view of a project has a docstring to be taken for the view's."""
    ours = [base for base in view.__mro__ if base.__module__.startswith("idempotency_django")]
    assert ours
    assert [base.__doc__ for base in ours] == [None] * len(ours)
