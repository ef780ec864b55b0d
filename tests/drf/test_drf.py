"""``IdempotentViewMixin`` on APIViews, generic views, viewsets and their actions; its responses.

What holds for every adapter is in ``test_adapters.py``.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.test import Client
from django.urls import include, path
from rest_framework import exceptions, routers, viewsets
from rest_framework.decorators import action, api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.schemas.openapi import AutoSchema
from rest_framework.test import APIClient
from rest_framework.views import APIView, exception_handler

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotencyAPIException, IdempotentViewMixin
from idempotency_django.engine import InProgress
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.http import IdempotencyStatusView
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import PAYMENT, Policy, scopes
from tests.models import Effect
from tests.support.shared import (
    EffectSerializer,
    assert_problem,
    assert_replays,
    effects,
    is_replay,
    new_key,
    post,
    record,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


class Plain(IdempotentViewMixin, APIView):
    """What happens in the view depends on the reference."""

    authentication_classes: ClassVar[list[Any]] = []
    finalized = 0

    def post(self, request: Request) -> HttpResponse:
        reference = request.data["reference"]
        Effect.objects.create(reference=reference)
        return self.response(reference)

    def response(self, reference: str) -> HttpResponse:
        match reference.split(":"):
            case ["raise", "400"]:
                raise exceptions.ValidationError({"reference": ["wrong"]})
            case ["raise", "error"]:
                raise LookupError("boom")
        return Response({"reference": reference}, status=201, headers={"Location": "/effects/1"})

    def finalize_response(self, *args: Any, **kwargs: Any) -> Any:
        Plain.finalized += 1
        return super().finalize_response(*args, **kwargs)


class Effects(IdempotentViewMixin, viewsets.ModelViewSet[Effect]):
    queryset = Effect.objects.all()
    serializer_class = EffectSerializer
    authentication_classes: ClassVar[list[Any]] = []
    idempotency_policies = {"pay": PAYMENT, "preview": None}

    @action(detail=True, methods=["post"])
    def pay(self, request: Request, pk: str) -> Response:
        Effect.objects.create(reference="paid")
        return Response({"paid": pk})

    @action(detail=False, methods=["post"])
    def preview(self, request: Request) -> Response:
        assert request.idempotency is None
        Effect.objects.create(reference="preview")
        return Response({})


def key_in_another_header(call: Any) -> str | None:
    key: str | None = call.request.headers.get("X-Request-Key")
    return key


class Hooked(Plain):
    """Has another policy for some requests."""

    def get_idempotency_policy(self) -> Policy | None:
        return None if self.request.headers.get("X-Off") else Policy(key=key_in_another_header)


@api_view(["POST"])
@idempotent
def below(request: Request) -> Response:
    return function(request)


def function(request: Request) -> Response:
    assert isinstance(request.idempotency, ExecutionContext)
    Effect.objects.create(reference=request.data["reference"])
    return Response({"attempt": request.idempotency.attempt}, status=201)


class Both(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []

    @idempotent(scope=scopes.shared)
    def post(self, request: Request) -> Response:
        return function(request)


router = routers.SimpleRouter()
router.register("effects", Effects)
urlpatterns = [
    path("plain/", Plain.as_view()),
    path("hooked/", Hooked.as_view()),
    path("below/", below),
    path("both/", Both.as_view()),
    path("", include(router.urls)),
]


@pytest.fixture(autouse=True)
def _reset() -> None:
    Plain.finalized = 0


class TestReplay:
    """A retry receives the first response."""

    @pytest.mark.parametrize("url", ["/effects/", "/below/", "/both/"])
    def test_replay(self, client: Client, url: str) -> None:
        """On every kind of view: one effect, and the same status, bytes and headers again."""
        key = new_key()
        first = post(client, url, key)
        assert first.status_code == 201
        assert_replays(first, post(client, url, key))
        assert_replays(first, post(client, url, key))
        assert effects() == 1
        assert IdempotencyKey.objects.count() == 1
        assert record(key).replay_count == 2

    def test_finalized_once(self, client: Client) -> None:
        """The view's ``finalize_response`` runs once for each response."""
        key = new_key()
        post(client, "/plain/", key)
        assert Plain.finalized == 1
        post(client, "/plain/", key)
        assert Plain.finalized == 2


class TestRefusal:
    """What is refused, how, and that nothing is executed."""

    def test_exception_handler_is_called_once(self, settings: Any) -> None:
        """An error that it does not handle is shown to it once, as without a key."""
        settings.REST_FRAMEWORK = {"EXCEPTION_HANDLER": f"{__name__}.noting_handler"}
        client = Client(raise_request_exception=False)
        for key in (None, new_key()):
            noted.clear()
            assert post(client, "/plain/", key, "raise:error").status_code == 500
            assert [type(error) for error in noted] == [LookupError]

    def test_parse_error(self, client: Client) -> None:
        """A body that does not parse is refused as DRF refuses it, and nothing is stored."""
        key = new_key()
        response = client.post(
            "/plain/", "{", content_type="application/json", headers={"Idempotency-Key": key}
        )
        assert response.status_code == 400
        assert "JSON parse error" in response.json()["detail"]
        assert (record(key).status, record(key).response_body) == ("failed", None)


noted: list[Exception] = []


def noting_handler(error: Exception, context: Any) -> None:
    noted.append(error)


def test_raised_4xx_is_released(client: Client) -> None:
    """A raised error of REST framework rolls back and is not stored."""
    key = new_key()
    for _ in range(2):
        response = post(client, "/plain/", key, "raise:400")
        assert response.status_code == 400
        assert not is_replay(response)
    assert effects("raise:400") == 0
    assert record(key).attempt == 2


def test_operations_do_not_share_keys(client: Client) -> None:
    """The same key on another route is another operation."""
    key = new_key()
    post(client, "/plain/", key)
    assert not is_replay(post(client, "/below/", key))


class TestConfiguration:
    """Policies per view and action, and the hooks."""

    def test_policy_per_action(self, client: Client) -> None:
        """An action has the policy that ``idempotency_policies`` names for it."""
        assert_problem(post(client, "/effects/1/pay/"), 400, "key-missing")
        key = new_key()
        post(client, "/effects/1/pay/", key)
        row = record(key)
        assert row.expires_at is not None
        assert row.completed_at is not None
        assert row.expires_at - row.completed_at == timedelta(days=30)

    def test_action_without_policy(self, client: Client) -> None:
        """``None`` takes an action out."""
        key = new_key()
        for _ in range(2):
            assert post(client, "/effects/preview/", key).status_code == 200
        assert effects("preview") == 2

    def test_hooks(self, client: Client) -> None:
        """A view may say itself what its policy is, for each request."""
        key = new_key()
        first = post(client, "/hooked/", headers={"X-Request-Key": key})
        assert_replays(first, post(client, "/hooked/", headers={"X-Request-Key": key}))
        off = post(client, "/hooked/", headers={"X-Request-Key": key, "X-Off": "1"})
        assert not is_replay(off)
        assert effects() == 2


def test_async_handlers() -> None:
    """A view with async handlers, as of adrf, is refused when its URL is made."""

    class Async(IdempotentViewMixin, APIView):
        async def post(self, request: Request) -> Response:
            return Response()

    with pytest.raises(ImproperlyConfigured, match=r"Async is an async view .* aidempotent_call"):
        Async.as_view()


# What its views return: responses of its own class, as the project's handler of errors says.


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


urlpatterns += [
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


@pytest.mark.parametrize("view", [Undocumented, Create])
def test_no_docstring_to_inherit(view: Any) -> None:
    """No class above a view of a project has a docstring to be taken for the view's."""
    ours = [base for base in view.__mro__ if base.__module__.startswith("idempotency_django")]
    assert ours
    assert [base.__doc__ for base in ours] == [None] * len(ours)
