"""The schema of drf-spectacular says what is enforced, with no configuration of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from django.test import override_settings
from django.urls import include, path
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from drf_spectacular.validation import validate_schema
from rest_framework import serializers, viewsets
from rest_framework.decorators import action
from rest_framework.generics import GenericAPIView
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency_django import errors
from idempotency_django.contrib.concurrency import errors as concurrency
from idempotency_django.contrib.described import problems_of
from idempotency_django.contrib.messaging import errors as messages
from idempotency_django.decorators import idempotency_exempt, idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.errors import StoreUnavailable, all_errors
from idempotency_django.http.responses import error_body
from idempotency_django.policy import PAYMENT, Policy, keys
from tests.support.outside import ROOT
from tests.support.ways import MIDDLEWARE


class Thing(serializers.Serializer[Any]):
    reference = serializers.CharField()


class Base(GenericAPIView):
    serializer_class = Thing
    authentication_classes = ()

    def post(self, request: Request) -> Response:
        return Response({}, status=201)


class Plain(Base):
    """A view of the middleware."""


class Things(IdempotentViewMixin, viewsets.GenericViewSet[Any]):
    serializer_class = Thing
    authentication_classes = ()
    idempotency_policy = PAYMENT
    idempotency_policies = {"preview": None}

    def create(self, request: Request) -> Response:
        return Response({}, status=201)

    @extend_schema(
        description="Pays.",
        parameters=[OpenApiParameter("X-Own", str, OpenApiParameter.HEADER)],
        responses={200: Thing, 409: OpenApiResponse(Thing, "It was paid by another order.")},
    )
    @action(detail=False, methods=["post"])
    def pay(self, request: Request) -> Response:
        return Response({})

    @action(detail=False, methods=["post"])
    def preview(self, request: Request) -> Response:
        return Response({})

    def list(self, request: Request) -> Response:
        return Response([])


class Decorated(Base):
    @idempotent(policy=Policy(key_format="uuid", required=True))
    def post(self, request: Request) -> Response:
        return super().post(request)


class PerRequest(IdempotentViewMixin, Base):
    idempotency_policy = PAYMENT

    def get_idempotency_policy(self) -> Policy | None:
        return None


class Derived(Base):
    idempotency_policy = Policy(key=keys.instead_of_header(keys.natural("reference")))


@extend_schema(parameters=[OpenApiParameter("idempotency-key", int, OpenApiParameter.HEADER)])
class Documented(Base):
    pass


THINGS = {"post": "create", "get": "list"}
urlpatterns = [
    path("plain/", Plain.as_view()),
    path("things/", Things.as_view(THINGS)),
    path("things/pay/", Things.as_view({"post": "pay"}, **Things.pay.kwargs)),
    path("things/preview/", Things.as_view({"post": "preview"})),
    path("decorated/", Decorated.as_view()),
    path("derived/", Derived.as_view()),
    path("perrequest/", PerRequest.as_view()),
    path("documented/", Documented.as_view()),
    path("exempt/", idempotency_exempt(Base.as_view())),
]
pytestmark = pytest.mark.urls(__name__)


@pytest.fixture
def schema(settings: Any) -> dict[str, Any]:
    """The schema of the views above, which is valid."""
    settings.MIDDLEWARE = MIDDLEWARE
    return generated()


def generated() -> dict[str, Any]:
    made: dict[str, Any] = SchemaGenerator().get_schema(request=None, public=True)  # type: ignore[no-untyped-call]
    validate_schema(made)
    return made


def key_of(operation: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameters for the key."""
    named = operation.get("parameters", [])
    return [each for each in named if each["name"].lower() == "idempotency-key"]


def test_protected(schema: dict[str, Any]) -> None:
    """An operation has the key, the problems, the mark of a replay, and its promise."""
    operation = schema["paths"]["/things/"]["post"]
    [key] = key_of(operation)
    assert (key["in"], key["required"], "example" in key) == ("header", True, False)
    assert {"400", "409", "422", "503"} <= operation["responses"].keys()
    problem = operation["responses"]["409"]
    assert problem["content"].keys() == {"application/problem+json"}
    assert "Retry-After" in problem["headers"]
    marks = operation["responses"]["201"]["headers"]
    assert marks.keys() == {"Idempotent-Replayed", "Idempotency-Status"}
    assert operation["x-idempotency"] == {
        "required": True,
        "lifetime-seconds": int(PAYMENT.resolved().ttl.total_seconds()),  # type: ignore[union-attr]
    }
    component = schema["components"]["schemas"]["IdempotencyProblem"]
    members = error_body(StoreUnavailable())
    assert members.keys() == set(component["required"])
    assert component["properties"].keys() == members.keys()
    assert members["state"] in component["properties"]["state"]["description"]


@pytest.mark.parametrize("where", ["/things/preview/", "/exempt/"])
def test_unprotected(schema: dict[str, Any], where: str) -> None:
    """What is not protected promises nothing."""
    operation = schema["paths"][where]["post"]
    assert key_of(operation) == []
    assert "x-idempotency" not in operation
    assert "409" not in operation["responses"]
    assert "x-idempotency" not in schema["paths"]["/things/"]["get"]


def test_middleware(settings: Any) -> None:
    """A view of the middleware is documented where the middleware is installed."""
    settings.MIDDLEWARE = MIDDLEWARE
    operation = generated()["paths"]["/plain/"]["post"]
    assert operation["x-idempotency"]["required"] is False
    assert [key["required"] for key in key_of(operation)] == [False]
    assert "Key required" not in operation["responses"]["400"]["description"]
    settings.MIDDLEWARE = []
    assert "x-idempotency" not in generated()["paths"]["/plain/"]["post"]


def test_extended_action(schema: dict[str, Any]) -> None:
    """What @extend_schema says of an action stays, and the promise is added to it."""
    operation = schema["paths"]["/things/pay/"]["post"]
    assert operation["description"] == "Pays."
    assert {each["name"] for each in operation["parameters"]} == {"X-Own", "Idempotency-Key"}
    own = operation["responses"]["409"]
    assert own["description"] == "It was paid by another order."
    assert own["content"].keys() == {"application/json", "application/problem+json"}


def test_format(schema: dict[str, Any]) -> None:
    """The format of keys is in the schema of the parameter."""
    [key] = key_of(schema["paths"]["/decorated/"]["post"])
    assert key["schema"] == {"type": "string", "format": "uuid"}
    assert key["required"]


def test_key_of_the_request(schema: dict[str, Any]) -> None:
    """Where the key comes from the body, no header is documented."""
    operation = schema["paths"]["/derived/"]["post"]
    assert key_of(operation) == []
    assert operation["x-idempotency"]["required"] is False
    assert "400" not in operation["responses"]


def test_documented_by_the_project(schema: dict[str, Any]) -> None:
    """A parameter that the project documents itself is left as it is."""
    [key] = key_of(schema["paths"]["/documented/"]["post"])
    assert (key["name"], key["schema"]) == ("idempotency-key", {"type": "integer"})


@override_settings(
    IDEMPOTENCY={
        "HEADER": "Request-Id",
        "STATUS_CODES": {"mismatch": 400},
    }
)
def test_settings(schema: dict[str, Any]) -> None:
    """The name of the header and the statuses are those of the settings."""
    operation = generated()["paths"]["/things/"]["post"]
    assert [each["name"] for each in operation["parameters"]] == ["Request-Id"]
    assert "Idempotent-Replayed" in operation["responses"]["201"]["headers"]
    assert "422" not in operation["responses"]
    assert "different request" in operation["responses"]["400"]["description"]


@pytest.mark.parametrize("whole", [True, False])
def test_namespaces(settings: Any, whole: bool) -> None:
    """One view in two namespaces: the schema says which of them the middleware protects."""
    settings.MIDDLEWARE = MIDDLEWARE
    settings.IDEMPOTENCY = {"MIDDLEWARE_PROTECTS": ["v2"]}
    views = [path("plain/<int:pk>/", Plain.as_view())]
    urls = [path(f"api/{name}/", include((views, name))) for name in ("v1", "v2")]
    settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": urls})
    patterns = None if whole else [path("v1/", include(views)), path("v2/", include(views))]
    generator = SchemaGenerator(patterns=patterns)  # type: ignore[no-untyped-call]
    paths = generator.get_schema(request=None, public=True)["paths"]  # type: ignore[no-untyped-call]
    promised = [name for name, each in paths.items() if "x-idempotency" in each["post"]]
    assert promised == (["/api/v2/plain/{id}/"] if whole else ["/v2/plain/{id}/"])


def test_policy_per_request(schema: dict[str, Any]) -> None:
    """Where each request has a policy of its own, nothing is promised, and no key required."""
    operation = schema["paths"]["/perrequest/"]["post"]
    assert operation["x-idempotency"] == {"varies": True}
    assert [each["required"] for each in key_of(operation)] == [False]


def test_reference_app() -> None:
    """With drf-spectacular among the apps, and nothing else, the command's schema is complete."""
    command = [sys.executable, "-m", "django", "spectacular", "--validate", "--format=openapi-json"]
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.support.openapi_settings"}
    runs = [
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    paths = json.loads(runs[0])["paths"]
    assert paths["/api/transfers/"]["post"]["x-idempotency"]["required"] is True
    assert "x-idempotency" not in paths["/api/unprotected/"]["post"]
    assert "x-idempotency" in paths["/api/viamiddleware/"]["post"]


def test_every_problem_is_considered() -> None:
    """Each problem is documented for some endpoint, or named here as none of an endpoint's."""
    of_others = {
        # of consumers, webhooks and preconditions, which have pages of their own
        *(messages.DeadLettered, messages.UnknownEventType, messages.SignatureRefused),
        messages.DeliveryMalformed,
        *(concurrency.PreconditionFailed, concurrency.PreconditionRequired),
        *(concurrency.ConcurrentModification, concurrency.IllegalTransition),
        # of endpoints that cannot be protected
        errors.KeyUnsupported,
        # of the server, 500: a client can do nothing about them
        *(errors.ClaimLost, errors.StepsChanged),
    }
    policies = [
        Policy(required=True, on_interrupted="hold"),
        Policy(on_expired="refuse", retention=timedelta(days=7)),
    ]
    documented = {error for policy in policies for error in problems_of(policy.resolved(), "POST")}
    assert documented.isdisjoint(of_others)
    assert documented | of_others == {*all_errors()}
