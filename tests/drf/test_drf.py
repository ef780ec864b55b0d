"""``IdempotentViewMixin`` on APIViews, generic views, viewsets and their actions.

What holds for every adapter is in ``test_adapters.py``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.test import Client
from django.urls import include, path
from rest_framework import exceptions, generics, permissions, routers, viewsets
from rest_framework.authentication import BasicAuthentication
from rest_framework.decorators import action, api_view
from rest_framework.parsers import JSONParser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.engine.context import ExecutionContext
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

    put = patch = delete = get = post

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


class Required(Plain):
    idempotency_policy = Policy(required=True)


class Owned(IdempotentViewMixin, generics.CreateAPIView[Effect]):
    """Alice and Bob, told apart by their passwords."""

    authentication_classes = [BasicAuthentication]
    permission_classes = [permissions.IsAuthenticated, permissions.DjangoModelPermissions]
    queryset = Effect.objects.all()
    serializer_class = EffectSerializer


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


class JSONOnly(Plain):
    """Never looks at its data, so any media type will do."""

    parser_classes = [JSONParser]

    def post(self, request: Request) -> HttpResponse:
        Effect.objects.create(reference="raw")
        return HttpResponse(request._request.body, "text/plain")


class Extra(Plain):
    """Checks something of its own after DRF has checked."""

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        if request.headers.get("X-Revoked"):
            raise exceptions.PermissionDenied


@api_view(["POST"])
@idempotent
def below(request: Request) -> Response:
    return function(request)


def function(request: Request) -> Response:
    assert isinstance(request.idempotency, ExecutionContext)
    Effect.objects.create(reference=request.data["reference"])
    return Response({"attempt": request.idempotency.attempt}, status=201)


class MethodDecorated(APIView):
    authentication_classes: ClassVar[list[Any]] = []

    @idempotent
    def post(self, request: Request) -> Response:
        return function(request)


class Both(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []

    @idempotent(scope=scopes.shared)
    def post(self, request: Request) -> Response:
        return function(request)


class MethodRequired(APIView):
    authentication_classes: ClassVar[list[Any]] = []

    @idempotent(required=True)
    def post(self, request: Request) -> Response:
        return function(request)


router = routers.SimpleRouter()
router.register("effects", Effects)
urlpatterns = [
    path("plain/", Plain.as_view()),
    path("required/", Required.as_view()),
    path("owned/", Owned.as_view()),
    path("hooked/", Hooked.as_view()),
    path("json-only/", JSONOnly.as_view()),
    path("extra/", Extra.as_view()),
    path("below/", below),
    path("method/", MethodDecorated.as_view()),
    path("both/", Both.as_view()),
    path("method-required/", MethodRequired.as_view()),
    path("", include(router.urls)),
]


@pytest.fixture(autouse=True)
def _reset() -> None:
    Plain.finalized = 0


class TestReplay:
    """A retry receives the first response."""

    @pytest.mark.parametrize(
        "url", ["/plain/", "/effects/", "/below/", "/method/", "/both/", "/method-required/"]
    )
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

    def test_required_is_for_post_and_patch(self, client: Client) -> None:
        """PUT and DELETE are idempotent by themselves; ``required`` does not ask them for a key."""
        assert post(client, "/required/", method="put").status_code == 201
        assert_problem(post(client, "/required/", method="patch"), 400, "key-missing")

    def test_exception_handler_is_called_once(self, settings: Any) -> None:
        """An error that it does not handle is shown to it once, as without a key."""
        settings.REST_FRAMEWORK = {"EXCEPTION_HANDLER": f"{__name__}.noting_handler"}
        client = Client(raise_request_exception=False)
        for key in (None, new_key()):
            noted.clear()
            assert post(client, "/plain/", key, "raise:error").status_code == 500
            assert [type(error) for error in noted] == [LookupError]

    def test_unauthorized_first(self, client: Client) -> None:
        """Authentication comes before the key is looked at."""
        assert post(client, "/owned/", "bad key").status_code == 401

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


class TestFailure:
    """What is rolled back, and what is kept of it."""

    def test_raised_4xx_is_released(self, client: Client) -> None:
        """A raised error of REST framework rolls back and is not stored."""
        key = new_key()
        for _ in range(2):
            response = post(client, "/plain/", key, "raise:400")
            assert response.status_code == 400
            assert not is_replay(response)
        assert effects("raise:400") == 0
        assert record(key).attempt == 2


class TestIdentity:
    """Whose response it is."""

    @pytest.fixture
    def clients(self) -> dict[str, Client]:
        """Alice and Bob, who may add effects."""
        from django.contrib.auth.models import Permission

        clients = {}
        for name in ("alice", "bob"):
            user = User.objects.create_user(name, password=name)
            user.user_permissions.add(Permission.objects.get(codename="add_effect"))
            clients[name] = Client(headers={"Authorization": _basic(name)})
        return clients

    def test_checks_of_a_subclass(self, client: Client) -> None:
        """What a subclass checks in ``initial()`` comes before a replay too."""
        key = new_key()
        first = post(client, "/extra/", key)
        assert post(client, "/extra/", key, headers={"X-Revoked": "1"}).status_code == 403
        assert_replays(first, post(client, "/extra/", key))

    def test_tenant_scope_on_demand(self, clients: dict[str, Client], settings: Any) -> None:
        """With ``principal=False`` colleagues of a tenant receive one another's responses."""
        tenant = scopes.per_tenant(lambda request: request.headers["X-Tenant"])
        settings.IDEMPOTENCY = {"POLICY": {"scope": tenant, "principal": False}}
        key = new_key()
        first = post(clients["alice"], "/owned/", key, headers={"X-Tenant": "1"})
        assert_replays(first, post(clients["bob"], "/owned/", key, headers={"X-Tenant": "1"}))
        other = post(clients["bob"], "/owned/", key, headers={"X-Tenant": "2"})
        assert not is_replay(other)

    def test_operations_do_not_share_keys(self, client: Client) -> None:
        """The same key on another route is another operation."""
        key = new_key()
        post(client, "/plain/", key)
        assert not is_replay(post(client, "/extra/", key))

    def test_objects_of_one_route(self, client: Client) -> None:
        """The same key for another object of the same route is a mismatch, not a replay."""
        key = new_key()
        post(client, "/effects/1/pay/", key)
        assert_problem(post(client, "/effects/2/pay/", key), 422, "mismatch")
        assert effects("paid") == 1


def _basic(name: str) -> str:
    from base64 import b64encode

    return "Basic " + b64encode(f"{name}:{name}".encode()).decode()


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


class TestBodies:
    """What counts as the same request."""

    def test_unparsed_media_type(self, client: Client) -> None:
        """A body that no parser knows counts byte for byte, when the view reads it itself."""
        key = new_key()

        def send(data: bytes) -> Any:
            return client.post(
                "/json-only/", data, content_type="text/plain", headers={"Idempotency-Key": key}
            )

        first = send(b"one")
        assert first.content == b"one"
        assert_replays(first, send(b"one"))
        assert_problem(send(b"two"), 422, "mismatch")


def test_async_handlers() -> None:
    """A view with async handlers, as of adrf, is refused when its URL is made."""

    class Async(IdempotentViewMixin, APIView):
        async def post(self, request: Request) -> Response:
            return Response()

    with pytest.raises(ImproperlyConfigured, match=r"Async is an async view .* aidempotent_call"):
        Async.as_view()
