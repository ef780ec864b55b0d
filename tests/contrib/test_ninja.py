"""Operations of django-ninja: what runs once, what runs for every request, and what is refused.

What holds for every adapter is in ``test_adapters.py``, and the probes of all ways to protect
(``tests/support/ways.py``) run over operations, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count, product
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from ninja import NinjaAPI, Router, Schema, Status
from ninja.decorators import decorate_view
from ninja.errors import HttpError
from ninja.security import APIKeyHeader, HttpBearer
from openapi_spec_validator import validate

from idempotency_django.checks.inventory import endpoints
from idempotency_django.decorators import idempotency_exempt, idempotent
from idempotency_django.errors import FingerprintMismatch, IdempotencyError
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy, store_errors
from tests.models import Effect
from tests.support import ways
from tests.support.shared import (
    assert_problem,
    assert_replays,
    effects,
    is_replay,
    new_key,
    post,
    record,
)

pytestmark = pytest.mark.django_db(transaction=True)


class Order(Schema):
    reference: str


class Made(Schema):
    number: int


Serve = Callable[..., NinjaAPI]


@pytest.fixture
def serve(settings: Any) -> Serve:
    """Serve APIs below ``/<version>/``; an API, or the routers of one that is made."""
    numbers = count()

    def serve(*routers: Router, **options: Any) -> NinjaAPI:
        api = NinjaAPI(version=f"v{next(numbers)}", urls_namespace=f"test-{new_key()}", **options)
        for router in routers:
            api.add_router("", router)
        served.append(api)
        settings.ROOT_URLCONF = type(
            "urls",
            (),
            {"urlpatterns": [path(f"{each.version}/", each.urls) for each in served]},
        )
        return api

    served: list[NinjaAPI] = []
    return serve


def create(request: HttpRequest, order: Order) -> Any:
    Effect.objects.create(reference=order.reference)
    return Status(201, {"number": Effect.objects.count()})


def orders(function: Any = None, policy: Policy | None = None, **options: Any) -> Router:
    router = Router()
    protected = idempotent(policy=policy or Policy())(function or create)
    router.post("/orders", **{"response": {201: Made}, **options})(protected)
    return router


def test_a_router_in_two_apis(serve: Serve, client: Client) -> None:
    """Each API's copy of an operation is protected, and has records of its own."""
    router = orders()
    serve(router)
    serve(router)
    key = new_key()
    for version in ("v0", "v1"):
        first = post(client, f"/{version}/orders", key)
        assert first.status_code == 201
        assert_replays(first, post(client, f"/{version}/orders", key))
    assert effects() == 2
    assert set(IdempotencyKey.objects.values_list("operation", flat=True)) == {
        "POST /v0/orders",
        "POST /v1/orders",
    }
    assert {each.how for each in endpoints()} == {"decorator"}


class Tokens(HttpBearer):
    """Bearer tokens, which the test gives out and withdraws."""

    known: dict[str, Any] = {}

    def authenticate(self, request: HttpRequest, token: str) -> Any:
        return self.known.get(token)


class ApiKeys(APIKeyHeader):
    """The same, in a header of their own."""

    param_name = "X-API-Key"

    def authenticate(self, request: HttpRequest, key: str | None) -> Any:
        return Tokens.known.get(key or "")


BEARER = ("Authorization", "Bearer ", Tokens())
API_KEY = ("X-API-Key", "", ApiKeys())


def a_user(name: str) -> User:
    return User(pk=len(name), username=name)  # as JWT libraries make it


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        *product((BEARER, API_KEY), (a_user, str)),
        *product([BEARER], (lambda name: {"sub": name}, lambda name: True)),
    ],
)
@pytest.mark.parametrize("session", [False, True])
def test_replays_belong_to_the_token(
    serve: Serve, client: Client, kind: Any, known: Any, session: bool
) -> None:
    """Another token, a rejected one, and no token get no replay, whatever the session says."""
    header, prefix, auth = kind
    Tokens.known = {name: known(name) for name in ("alice", "carol-b")}
    serve(orders(auth=auth))
    if session:
        client.force_login(User.objects.create_user("session"))
    key = new_key()

    def send(token: str | None) -> HttpResponse:
        headers = {} if token is None else {header: prefix + token}
        return post(client, "/v0/orders", key, headers=headers)

    assert send("alice").status_code == 201
    assert is_replay(send("alice"))
    others = [send("rejected"), send(None), send("carol-b")]
    assert not any(map(is_replay, others))
    assert [each.status_code for each in others[:2]] == [401, 401]
    del Tokens.known["alice"]
    assert send("alice").status_code == 401


@pytest.mark.parametrize("known", [str, lambda token: {"sub": token}, lambda token: User(pk=1)])
def test_a_new_token(serve: Serve, client: Client, known: Any) -> None:
    """If the authentication returns the token, or nobody, a new token is refused: the retry may be
    that of the same client, whose operation must not run twice.
    """
    Tokens.known = {token: known(token) for token in ("first", "second")}
    serve(orders(auth=Tokens()))
    key = new_key()
    first, again = (
        post(client, "/v0/orders", key, headers={"Authorization": f"Bearer {token}"})
        for token in ("first", "second")
    )
    is_user = isinstance(Tokens.known["first"], User)
    assert (first.status_code, again.status_code) == (201, 201 if is_user else 422)
    assert effects() == 1


def test_users_without_a_primary_key(serve: Serve, client: Client) -> None:
    """A policy with principal= knows the caller, whoever else the request's user is."""

    class Service:
        is_authenticated = True

    def key_of_service(request: HttpRequest) -> Any:
        request.user = Service()  # type: ignore[assignment]
        return {"service": 1}

    policy = Policy(principal=lambda call: "service:1")
    serve(orders(policy=policy, auth=key_of_service))
    key = new_key()
    assert_replays(post(client, "/v0/orders", key), post(client, "/v0/orders", key))


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("shared", [{}, {"Authorization": "Basic of-a-gateway"}])
@pytest.mark.parametrize("known", [{"sub": "alice"}, True])
def test_credentials_that_identify_nobody(
    serve: Serve, client: Client, known: Any, shared: dict[str, str], session: bool
) -> None:
    """If nothing tells the callers of an operation apart, it is refused before it runs.

    A session doesn't, because callers who share it have authenticated in another way, and neither
    does Authorization, because nobody knows whether a plain function has read it.
    """
    if session:
        client.force_login(User.objects.create_user("session"))
    serve(orders(auth=lambda request: known if "X-Own" in request.headers else None))
    with pytest.raises(ImproperlyConfigured, match="nothing identifies the caller"):
        post(client, "/v0/orders", new_key(), headers={"X-Own": "1", **shared})
    assert effects() == 0
    serve(orders(auth=lambda request: known, policy=Policy(principal=lambda request: "alice")))
    key = new_key()
    assert_replays(post(client, "/v1/orders", key), post(client, "/v1/orders", key))


def test_a_response_that_does_not_suit_its_schema(serve: Serve, client: Client) -> None:
    """The response is made within the transaction: if it cannot be made, nothing is kept."""

    def wrong(request: HttpRequest, order: Order) -> Any:
        create(request, order)
        return Status(201, {"number": "none"})

    serve(orders(wrong))
    key = new_key()
    with pytest.raises(Exception, match="number"):
        post(client, "/v0/orders", key)
    assert effects() == 0
    assert record(key).status == "failed"


def test_an_error_of_ninja_is_stored(serve: Serve, client: Client) -> None:
    """``should_store`` has a say in what an operation raises, as the API responds to it."""

    def decline(request: HttpRequest, order: Order) -> Any:
        calls.append(order.reference)
        raise HttpError(402, "declined")

    calls: list[str] = []
    serve(orders(decline, Policy(should_store=store_errors)))
    key = new_key()
    first, again = post(client, "/v0/orders", key), post(client, "/v0/orders", key)
    assert (first.status_code, first.json()) == (402, {"detail": "declined"})
    assert_replays(first, again)
    assert len(calls) == 1


@pytest.mark.parametrize("kind", [IdempotencyError, FingerprintMismatch, Exception])
def test_refusals_as_the_api_makes_them(serve: Serve, client: Client, kind: Any) -> None:
    """A handler for our errors makes the response of a refusal; one for all errors does not."""
    api = serve(orders())
    api.add_exception_handler(
        kind, lambda request, error: api.create_response(request, error.slug, status=418)
    )
    key = new_key()
    post(client, "/v0/orders", key)
    refused = post(client, "/v0/orders", key, "b")
    if kind is Exception:
        assert_problem(refused, 422, "mismatch")
    else:
        assert (refused.status_code, refused.json()) == (418, "mismatch")


def test_decorators_around_an_operation(serve: Serve, client: Client) -> None:
    """Decorators of a view, an operation, a router or an API run for each request, replays too."""
    seen: list[str] = []

    def notes(name: str) -> Any:
        def decorator(function: Any) -> Any:
            def inner(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                seen.append(name)
                return function(request, *args, **kwargs)

            return inner

        return decorator

    router = Router()
    function = idempotent(decorate_view(notes("below"))(create))
    router.post("/orders", response={201: Made})(decorate_view(notes("above"))(function))
    router.add_decorator(notes("view"), mode="view")
    serve(router)
    key = new_key()
    post(client, "/v0/orders", key)
    assert sorted(seen) == ["above", "below", "view"]
    assert is_replay(post(client, "/v0/orders", key))
    assert sorted(seen) == sorted(["above", "below", "view"] * 2)
    assert effects() == 1


class TestMiddleware:
    """Below the middleware, which cannot protect an operation itself."""

    @pytest.fixture(autouse=True)
    def _middleware(self, settings: Any) -> None:
        settings.MIDDLEWARE = ways.MIDDLEWARE

    @pytest.fixture
    def mixed(self, serve: Serve) -> None:
        """Three operations: protected, exempt, and neither."""
        router = orders()
        router.put("/orders", response={201: Made})(idempotency_exempt(create_again))
        router.patch("/orders", response={201: Made})(unprotected)
        serve(router)

    def test_refusal(self, mixed: None, client: Client, caplog: Any) -> None:
        """A key for an operation that nothing protects is refused, and the log says what to do."""
        key = new_key()
        assert_replays(post(client, "/v0/orders", key), post(client, "/v0/orders", key))
        assert post(client, "/v0/orders", key, method="put").status_code == 201
        assert_problem(post(client, "/v0/orders", key, method="patch"), 400, "key-unsupported")
        assert "Put @idempotent on the function, below" in caplog.text
        assert effects() == 2

    def test_refused_before_the_claim(self, serve: Serve, client: Client) -> None:
        """Where ninja refuses a request, nothing is said of the key, which stays free."""
        serve(orders(auth=lambda request: request.headers.get("X-Key")))
        refused = [
            post(client, "/v0/orders", new_key()),
            client.post(
                "/v0/orders",
                "{}",
                "application/json",
                headers={"X-Key": "k", "Idempotency-Key": new_key()},
            ),
        ]
        assert [response.status_code for response in refused] == [401, 422]
        assert not any(response.has_header("Idempotency-Status") for response in refused)
        assert not IdempotencyKey.objects.exists()

    def test_check(self, mixed: None, settings: Any) -> None:
        """A check says so before any request, until the middleware protects other paths."""
        [found] = [each for each in run_checks() if each.id == "idempotency_django.W023"]
        assert "cannot protect 1 view without a policy" in found.msg
        assert "tests.contrib.test_ninja (1)" in found.msg
        [problem] = filter(None, (each.problem for each in endpoints()))
        assert "tests.contrib.test_ninja.unprotected is a view of ninja" in problem
        assert {each.method: each.how for each in endpoints()} == {
            "POST": "decorator",
            "PUT": "exempt",
            "PATCH": "middleware",
        }
        settings.IDEMPOTENCY = {"MIDDLEWARE_PROTECTS": ["/api/"]}
        assert not [each for each in run_checks() if each.id == "idempotency_django.W023"]
        assert sorted(each.how for each in endpoints()) == ["", "decorator", "exempt"]


def create_again(request: HttpRequest, order: Order) -> Any:
    return create(request, order)


def unprotected(request: HttpRequest, order: Order) -> Any:
    return create(request, order)


def test_openapi(serve: Serve) -> None:
    """The schema has the header, the problems and the mark of a replay, and what the user wrote."""
    router = orders(
        policy=Policy(required=True),
        response={201: Made, 409: Made},
        openapi_extra={
            "parameters": [{"in": "query", "name": "trace", "schema": {"type": "string"}}],
            "responses": {"422": {"description": "Of my own"}},
        },
    )
    router.put("/orders")(create_again)
    router.get("/orders")(idempotent(lambda request: []))
    api = serve(router)
    schema: Any = api.get_openapi_schema()
    schema_as_json = json.loads(json.dumps(schema))
    validate(schema_as_json)
    described = schema_as_json["paths"]["/v0/orders"]["post"]
    assert [each["name"] for each in described["parameters"]] == ["trace", "Idempotency-Key"]
    assert described["parameters"][1]["required"]
    responses = described["responses"]
    assert set(responses) == {"201", "400", "409", "422", "503"}
    assert "Idempotent-Replayed" in responses["201"]["headers"]
    assert responses["409"]["description"] == "Conflict"
    assert set(responses["409"]["content"]) == {"application/json", "application/problem+json"}
    assert responses["422"]["description"] == "Of my own"
    assert described["x-idempotency"] == {"required": True, "lifetime-seconds": 86400}
    for method in ("put", "get"):
        assert "x-idempotency" not in schema_as_json["paths"]["/v0/orders"][method]
    assert schema == api.get_openapi_schema()


def test_leased_with_atomic_requests(serve: Serve, client: Client, always_atomic: None) -> None:
    """Others could not see a lease within Django's transaction, which ninja's view cannot give
    away: the operation is refused before it runs.
    """
    serve(orders(policy=Policy(mode="leased")))
    with pytest.raises(ImproperlyConfigured, match=r"In django-ninja, .* ATOMIC_REQUESTS off"):
        post(client, "/v0/orders", new_key())
    assert effects() == 0
