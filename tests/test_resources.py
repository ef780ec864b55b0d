"""Key → resource: what an operation has made is found by its key, and by nobody else's."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.db import models
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.test.utils import isolate_apps
from django.urls import NoReverseMatch, path
from rest_framework import serializers, viewsets
from rest_framework.authentication import (
    BaseAuthentication,
    SessionAuthentication,
    TokenAuthentication,
)
from rest_framework.authtoken.models import Token
from rest_framework.exceptions import ValidationError
from rest_framework.generics import GenericAPIView
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotencyKeyFilter, IdempotentViewMixin
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.http.resources import owner_of, pk_of, resource_of, with_resource
from idempotency_django.models import DatabaseNow, IdempotencyKey
from idempotency_django.policy import Policy, scopes, store_errors
from idempotency_django.stores.records import Payload
from tests.models import Effect, Member
from tests.support import LONG_AGO, assert_problem, is_replay, new_key, post
from tests.ways import MIDDLEWARE

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


class EffectSerializer(serializers.ModelSerializer[Effect]):
    class Meta:
        model = Effect
        fields = ("pk", "reference")


class Things(viewsets.ModelViewSet[Effect]):
    """Lists what it has created; a reference that begins with "hidden" is in no list."""

    authentication_classes: ClassVar[list[Any]] = [SessionAuthentication, TokenAuthentication]
    serializer_class = EffectSerializer
    filter_backends = [IdempotencyKeyFilter]

    def get_queryset(self) -> Any:
        return Effect.objects.exclude(reference__startswith="hidden").order_by("pk")

    def perform_create(self, serializer: Any) -> None:
        made = serializer.save()
        if self.request.idempotency:
            self.request.idempotency.resource = made
        if made.reference == "refused":
            raise ValidationError({"reference": "refused"})


class Mixin(IdempotentViewMixin, Things):
    pass


class Leased(Mixin):
    idempotency_policy = Policy(mode="leased")


class Shared(Mixin):
    idempotency_policy = Policy(scope=scopes.shared)


class Nobodys(Mixin):
    idempotency_policy = Policy(scope=scopes.shared, principal=False)


class Named(Mixin):
    idempotency_policy = Policy(operation="create a thing")


class Knowing(Mixin):
    idempotency_policy = Policy(principal=lambda call: call.request.query_params.get("who"))


class PerRequest(Mixin):
    idempotency_policies = {"list": None}

    def get_idempotency_policy(self) -> Policy | None:
        return None if self.action == "list" else Policy()

    def get_idempotency_scope(self) -> str | None:
        return f"mine {self.request.method}"

    def get_serializer_class(self) -> Any:
        assert self.request.method == self.request._request.method
        return super().get_serializer_class()


class NameAuthentication(BaseAuthentication):
    def authenticate(self, request: Request) -> tuple[Member, None]:
        return Member.objects.get(pk=request.headers["Authorization"]), None


class ByName(Mixin):
    authentication_classes = [NameAuthentication]


class ByMethod(Mixin):
    idempotency_policy = Policy(scope=lambda call: f"{call.method} things")


class Outliving(Mixin):
    idempotency_policy = Policy(key_ttl=timedelta(days=7))


class Erring(Mixin):
    idempotency_policy = Policy(should_store=store_errors)


class Unprotected(Mixin):
    idempotency_policy = None


class Decorated(GenericAPIView[Effect]):
    queryset = Effect.objects.all()
    filter_backends = [IdempotencyKeyFilter]
    authentication_classes = [SessionAuthentication]

    def get(self, request: Request) -> Response:
        return Response([each.pk for each in self.filter_queryset(self.get_queryset())])

    @idempotent(required=True, scope=scopes.shared)
    def post(self, request: Request) -> Response:
        request.idempotency.resource = Effect.objects.create(reference="a")
        return Response({}, status=201)


@idempotent(max_response_bytes=0)
def forgotten(request: HttpRequest) -> HttpResponse:
    made = Effect.objects.create(reference="a")
    request.idempotency.resource = made  # type: ignore[attr-defined]
    return HttpResponse(made.pk, status=201)


def odd(request: HttpRequest, response: HttpResponse) -> bool:
    raise LookupError


@idempotent(mode="leased", should_store=odd)
def unsure(request: HttpRequest) -> HttpResponse:
    made = Effect.objects.create(reference="a")
    request.idempotency.resource = made  # type: ignore[attr-defined]
    return HttpResponse(made.pk, status=201)


@idempotent
async def streamed(request: HttpRequest) -> StreamingHttpResponse:
    made = await Effect.objects.acreate(reference="a")
    request.idempotency.resource = made  # type: ignore[attr-defined]
    return StreamingHttpResponse(iter([b"one"]))


ACTIONS = {"post": "create", "get": "list"}
VIEWS = [
    Things,
    Mixin,
    Leased,
    Shared,
    Nobodys,
    Named,
    Knowing,
    PerRequest,
    ByMethod,
    ByName,
    Erring,
    Outliving,
    Unprotected,
]
urlpatterns = [
    *(path(f"{view.__name__.lower()}/", view.as_view(ACTIONS)) for view in VIEWS),
    path("decorated/", Decorated.as_view()),
    path("forgotten/", forgotten),
    path("unsure/", unsure),
    path("streamed/", streamed),
]


def found(client: Client, where: str, key: str, **options: Any) -> list[Any]:
    response = client.get(where, {"idempotency_key": key, **options.pop("query", {})}, **options)
    assert response.status_code == 200, response.content
    return response.json()  # type: ignore[no-any-return]


@pytest.fixture(params=["database", "memory", "redis"])
def store(request: pytest.FixtureRequest, settings: Any) -> str:
    """Each kind of store."""
    options = {
        "database": {"BACKEND": "idempotency_django.stores.database.DatabaseStore"},
        "memory": {"BACKEND": "idempotency_django.stores.memory.MemoryStore"},
        "redis": {"BACKEND": "idempotency_django.contrib.redis.RedisStore"},
    }
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        settings.CACHES = {
            **settings.CACHES,
            "default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.url},
        }
    settings.IDEMPOTENCY = {"STORES": {"default": options[request.param]}}
    return str(request.param)


@pytest.mark.parametrize(
    "where",
    [
        "things",
        "mixin",
        "leased",
        "shared",
        "named",
        "perrequest",
        "bymethod",
        "nobodys",
        "erring",
    ],
)
def test_found(where: str, settings: Any, alice: Client) -> None:
    """A list is filtered by the key of the request that created the object, however protected."""
    settings.MIDDLEWARE = MIDDLEWARE
    key, another = new_key(), new_key()
    made = post(alice, f"/{where}/", key).json()
    post(alice, f"/{where}/", another)
    assert found(alice, f"/{where}/", key) == [made]
    assert found(alice, f"/{where}/", f'"{key}"') == [made]
    assert found(alice, f"/{where}/", new_key()) == []
    assert len(alice.get(f"/{where}/").json()) == 2
    retry = post(alice, f"/{where}/", key)
    assert is_replay(retry)
    assert not [name for name in retry.headers if "resource" in name]


def test_stores(store: str, alice: Client) -> None:
    """Every store keeps what was made."""
    key = new_key()
    made = post(alice, "/leased/", key).json()
    assert found(alice, "/leased/", key) == [made]


def test_decorated(alice: Client) -> None:
    """The key of a decorated handler finds what it made."""
    key = new_key()
    post(alice, "/decorated/", key)
    assert found(alice, "/decorated/", key) == [Effect.objects.get().pk]


@pytest.mark.parametrize("where", ["/mixin/", "/shared/"])
def test_keys_of_others(where: str, alice: Client) -> None:
    """Another user's key finds nothing, also where users share a scope."""
    key = new_key()
    made = post(alice, where, key).json()
    bob = Client()
    bob.force_login(User.objects.create_user("bob"))
    assert found(bob, where, key) == []
    assert found(Client(), where, key) == []
    assert found(alice, where, key) == [made]


def test_keys_of_nobody(alice: Client) -> None:
    """Where keys belong to no caller, whoever knows the key finds what it made."""
    key = new_key()
    made = post(alice, "/nobodys/", key).json()
    assert found(Client(), "/nobodys/", key) == [made]


def test_keys_of_a_namesake() -> None:
    """Who has a deleted user's primary key finds nothing that this user has made."""
    key, headers = new_key(), {"Authorization": "alice"}
    Member.objects.create(username="alice")
    made = post(Client(), "/byname/", key, headers=headers).json()
    assert found(Client(), "/byname/", key, headers=headers) == [made]
    Member.objects.all().delete()
    Member.objects.create(username="alice")
    assert found(Client(), "/byname/", key, headers=headers) == []


def test_principal(alice: Client) -> None:
    """Where the policy says who is calling, the key is that caller's."""
    key = new_key()
    made = post(alice, "/knowing/?who=one", key).json()
    assert found(alice, "/knowing/", key, query={"who": "one"}) == [made]
    assert found(alice, "/knowing/", key, query={"who": "two"}) == []


def test_anonymous() -> None:
    """Without a user, the key belongs to the credentials, or to everybody who knows it."""
    key, secret = new_key(), new_key()
    made = post(Client(), "/mixin/", key).json()
    assert found(Client(), "/mixin/", key) == [made]
    assert found(Client(), "/mixin/", key, headers={"X-Api-Key": "17"}) == [made]
    made = post(Client(), "/mixin/", secret, headers={"X-Api-Key": "17"}).json()
    assert found(Client(), "/mixin/", secret, headers={"X-Api-Key": "17"}) == [made]
    assert found(Client(), "/mixin/", secret, headers={"X-Api-Key": "18"}) == []
    assert found(Client(), "/mixin/", secret) == []


def test_anonymous_in_a_shared_scope(alice: Client) -> None:
    """A user does not find what an unknown caller has made, as it would not be replayed, either."""
    key = new_key()
    made = post(Client(), "/shared/", key).json()
    assert found(Client(), "/shared/", key) == [made]
    assert found(alice, "/shared/", key) == []
    assert_problem(post(alice, "/shared/", key), 422, "mismatch")


@pytest.mark.parametrize(("hosts", "count"), [("refuse", 0), ("separate", 0), ("same", 1)])
def test_hosts(hosts: str, count: int, settings: Any, alice: Client) -> None:
    """A key counts on the hosts on which a retry would be replayed."""
    settings.ALLOWED_HOSTS = ["*"]
    settings.IDEMPOTENCY = {"HOSTS": hosts}
    key = new_key()
    post(alice, "/mixin/", key)
    assert len(found(alice, "/mixin/", key)) == 1
    assert len(found(alice, "/mixin/", key, headers={"Host": "other.example.com"})) == count


def test_permissions_of_now(alice: Client) -> None:
    """The view's queryset decides what is found, as it is now."""
    key = new_key()
    made = post(alice, "/mixin/", key).json()
    Effect.objects.filter(pk=made["pk"]).update(reference="hidden")
    assert found(alice, "/mixin/", key) == []
    Effect.objects.all().delete()
    assert found(alice, "/mixin/", key) == []


def test_token(alice: Client) -> None:
    """The caller is the one whom the view authenticates."""
    user = User.objects.get()
    authorization = {"Authorization": f"Token {Token.objects.create(user=user)}"}
    key = new_key()
    made = post(Client(), "/mixin/", key, headers=authorization).json()
    assert found(Client(), "/mixin/", key, headers=authorization) == [made]
    assert found(alice, "/mixin/", key) == [made]


def test_nothing_made(alice: Client) -> None:
    """What was rolled back, has expired, or names no resource or another model, is not found."""
    keys = [new_key() for _ in range(3)]
    assert post(alice, "/erring/", keys[0], reference="refused").status_code == 400
    assert is_replay(post(alice, "/erring/", keys[0], reference="refused"))
    assert found(alice, "/erring/", keys[0]) == []
    post(alice, "/mixin/", keys[1])
    IdempotencyKey.objects.filter(key=keys[1]).update(expires_at=LONG_AGO)
    assert found(alice, "/mixin/", keys[1]) == []
    assert found(alice, "/unprotected/", keys[2]) == []
    assert post(alice, "/leased/", keys[2], reference="refused").status_code == 400
    assert found(alice, "/leased/", keys[2]) == []


def test_another_model(alice: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of other objects shows none, whatever their primary keys are."""
    key = new_key()

    def perform_create(view: Any, serializer: Any) -> None:
        user = User.objects.get()
        serializer.save(pk=user.pk)
        view.request.idempotency.resource = user

    monkeypatch.setattr(Things, "perform_create", perform_create)
    post(alice, "/mixin/", key)
    assert found(alice, "/mixin/", key) == []


@isolate_apps("tests")
def test_proxy(alice: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the model is the same object, in the view that creates and in the list."""

    class Proxy(Effect):
        class Meta:
            proxy = True

    def perform_create(view: Any, serializer: Any) -> None:
        view.request.idempotency.resource = Proxy.objects.get(pk=serializer.save().pk)

    monkeypatch.setattr(Things, "perform_create", perform_create)
    key = new_key()
    made = post(alice, "/mixin/", key).json()
    assert found(alice, "/mixin/", key) == [made]
    monkeypatch.setattr(Things, "get_queryset", lambda view: Proxy.objects.order_by("pk"))
    assert found(alice, "/mixin/", key) == [made]


def test_primary_key_with_spaces() -> None:
    """A primary key may be any text."""
    member, owner = Member.objects.create(username="alice b c"), owner_of("", "")
    payload = with_resource(Payload(201, (), b""), member, owner)
    assert pk_of(payload, Member, {owner}) == "alice b c"
    assert resource_of(payload) == member


@pytest.mark.parametrize("key", ["", '"unterminated'])
def test_malformed(key: str, alice: Client) -> None:
    """A malformed key is refused, as in a request, and an empty one is no request for the list."""
    response = alice.get("/mixin/", {"idempotency_key": key})
    assert response.status_code == 400
    assert response.json()["code"] == "key-malformed"


@pytest.mark.parametrize("where", ["/forgotten/", "/unsure/"])
def test_resource_of_problem(where: str, alice: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry whose response was not stored gets the address of what was made, while it exists."""
    monkeypatch.setattr(Effect, "get_absolute_url", lambda it: f"/e/{it.pk}/", raising=False)
    key = new_key()
    made = post(alice, where, key).content.decode()
    problem = assert_problem(post(alice, where, key), 409, "response-not-stored")
    assert problem["resource"] == f"/e/{made}/"
    Effect.objects.all().delete()
    assert "resource" not in post(alice, where, key).json()


@isolate_apps("tests")
def test_removed_model() -> None:
    """Nor does the 409 have an address if the project has no such model any more."""

    class Removed(models.Model):
        class Meta:
            app_label = "tests"

        def __str__(self) -> str:
            return "removed"

    @idempotent(max_response_bytes=0)
    def view(request: HttpRequest) -> HttpResponse:
        request.idempotency.resource = Removed(pk=1)  # type: ignore[attr-defined]
        return HttpResponse("done")

    headers = {"Idempotency-Key": new_key()}
    assert view(RequestFactory().post("/", headers=headers)).status_code == 200
    retry = view(RequestFactory().post("/", headers=headers))
    assert "resource" not in assert_problem(retry, 409, "response-not-stored")


def test_expired_response(alice: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a key outlives its response, the 409 and the list name what was made."""
    monkeypatch.setattr(Effect, "get_absolute_url", lambda it: f"/e/{it.pk}/", raising=False)
    key = new_key()
    made = post(alice, "/outliving/", key).json()
    an_hour_ago = DatabaseNow() - timedelta(hours=1)
    IdempotencyKey.objects.filter(key=key).update(expires_at=an_hour_ago)
    problem = assert_problem(post(alice, "/outliving/", key), 409, "response-expired")
    assert problem["resource"] == f"/e/{made['pk']}/"
    assert found(alice, "/outliving/", key) == [made]
    IdempotencyKey.objects.filter(key=key).update(expires_at=LONG_AGO)
    assert found(alice, "/outliving/", key) == []


@pytest.mark.parametrize("fault", [NoReverseMatch, None])
def test_resource_without_address(
    fault: type[Exception] | None, alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an address, the problem names no resource."""

    def no_address(effect: Effect) -> str:
        raise NoReverseMatch

    if fault:
        monkeypatch.setattr(Effect, "get_absolute_url", no_address, raising=False)
    key = new_key()
    post(alice, "/forgotten/", key)
    problem = assert_problem(post(alice, "/forgotten/", key), 409, "response-not-stored")
    assert "resource" not in problem


def test_async(monkeypatch: pytest.MonkeyPatch) -> None:
    """An async view names what it has made, too."""
    monkeypatch.setattr(Effect, "get_absolute_url", lambda it: f"/e/{it.pk}/", raising=False)
    client, headers = AsyncClient(), {"Idempotency-Key": new_key()}
    send = async_to_sync(client.post)
    assert send("/streamed/", headers=headers).status_code == 200
    problem = assert_problem(send("/streamed/", headers=headers), 409, "response-not-stored")
    assert problem["resource"] == f"/e/{Effect.objects.get().pk}/"


@pytest.mark.parametrize("value", [None, 17, Effect(), Effect], ids=repr)
def test_refused(value: Any) -> None:
    """A resource that is not a saved object is refused where it is set."""
    execution = ExecutionContext(None, None, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a saved model instance, not"):
        execution.resource = value
    assert execution.resource is None


def test_schema() -> None:
    """OpenAPI documents the parameter."""
    [parameter] = IdempotencyKeyFilter().get_schema_operation_parameters(None)
    assert (parameter["name"], parameter["required"]) == ("idempotency_key", False)
