"""Every way to protect: two sends under one key are one effect, or a refusal by name."""

from __future__ import annotations

import asyncio
from functools import wraps
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.generic import View
from rest_framework.authtoken.models import Token

from idempotency_django.decorators import idempotent
from idempotency_django.models import IdempotencyKey
from tests.support import ways
from tests.support.shared import assert_problem, assert_replays, effects, is_replay, new_key, post
from tests.support.ways import REFUSED, WAYS, Refusal, Way, by_an_object, handler

pytestmark = pytest.mark.urls("tests.support.ways")

CASES = [
    pytest.param(
        way,
        middleware,
        id=f"{way.name}{'-below-the-middleware' * extra}",
        marks=pytest.mark.django_db(transaction=way.asynchronous),
    )
    for way in WAYS
    for middleware, extra in [(way.by == "middleware", False), (True, True)]
    if not (extra and way.by == "middleware")
]


@pytest.mark.parametrize(("way", "middleware"), CASES)
class TestWays:
    """Every way to protect, below the middleware and without it."""

    @pytest.fixture(autouse=True)
    def _middleware(self, settings: Any, middleware: bool) -> None:
        if middleware:
            settings.MIDDLEWARE = ways.MIDDLEWARE

    def test_two_sends_are_one_effect(self, alice: Client, way: Way) -> None:
        """One effect, one response, and no response for a caller whose permission is withdrawn."""
        key = new_key()
        first = post(alice, way.path, key)
        assert first.status_code == 201, first.content
        assert_replays(first, post(alice, way.path, key))
        assert_problem(post(alice, way.path, key, "b"), 422, "mismatch")
        if way.guarded:
            User.objects.get().user_permissions.clear()
            assert post(alice, way.path, key).status_code == 403
        assert (effects(), effects("b")) == (1, 0)


@pytest.mark.django_db
@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.name)
def test_refused(refusal: Refusal, alice: Client, settings: Any, caplog: Any) -> None:
    """What cannot be protected is refused by name, before anything is executed."""
    if refusal.by == "middleware":
        settings.MIDDLEWARE = ways.MIDDLEWARE
        settings.ROOT_URLCONF = type(
            "urls", (), {"urlpatterns": [path("refused/", refusal.make())]}
        )
        assert_problem(post(alice, "/refused/", new_key()), 400, "key-unsupported")
        said = caplog.text
    else:
        with pytest.raises(ImproperlyConfigured) as refused:
            view = refusal.make()
            settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("refused/", view)]})
            post(alice, "/refused/", new_key())
        said = str(refused.value)
    assert (refusal.says or "tests.support.ways.") in said
    assert effects() == 0


def of_a_class(*bases: type) -> Any:
    """A view whose handler has a decorator above ``@idempotent`` that leaves it to an object."""
    return ways.a_class(by_an_object(idempotent(handler())), *bases).as_view()


HIDDEN = {
    "function": lambda: by_an_object(idempotent(ways.plain)),
    "class": of_a_class,
    "drf": lambda: of_a_class(ways.Base),
    "mixin": lambda: of_a_class(*ways.mixed(ways.Base)),
}


@pytest.mark.django_db
@pytest.mark.parametrize("middleware", [True, False])
@pytest.mark.parametrize("kind", HIDDEN)
def test_hidden_by_a_decorator_above(
    alice: Client, settings: Any, caplog: Any, kind: str, middleware: bool
) -> None:
    """An object between them hides from the middleware and the mixin that a view is protected."""
    if kind == "mixin":
        with pytest.raises(ImproperlyConfigured, match=r"use functools\.wraps in the decorator"):
            HIDDEN[kind]()
        return
    settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("x/", HIDDEN[kind]())]})
    settings.MIDDLEWARE = ways.MIDDLEWARE if middleware else settings.MIDDLEWARE
    key = new_key()
    first = post(alice, "/x/", key)
    if middleware:
        assert_problem(first, 400, "key-unsupported")
        assert "use functools.wraps in the decorator" in caplog.text
        assert effects() == 0
        return
    assert_replays(first, post(alice, "/x/", key))
    assert effects() == 1


@pytest.mark.django_db
class TestHiddenInside:
    """The middleware in front of a wrapper that hides what is protected inside."""

    @pytest.fixture
    def served(self, settings: Any) -> Any:
        """Serves a view below the middleware."""
        settings.MIDDLEWARE = ways.MIDDLEWARE

        def serve(view: Any) -> None:
            settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("x/", view)]})

        return serve

    def test_looked_up_by_name(self, alice: Client, served: Any) -> None:
        """What a wrapper looks up while it runs cannot be seen: there is one claim, not two."""
        views = {"view": idempotent(ways.plain)}
        names: dict[str, Any] = {"views": views, "__name__": "shop.views"}
        exec("def by_name(request): return views['view'](request)", names)
        served(names["by_name"])
        key = new_key()
        assert_replays(post(alice, "/x/", key), post(alice, "/x/", key))
        assert (effects(), IdempotencyKey.objects.count()) == (1, 1)

    @pytest.mark.django_db(transaction=True)
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_another_view_beside_it(
        self, alice: Client, served: Any, unprotected: list[Any], asynchronous: bool
    ) -> None:
        """A wrapper that calls another view than the protected one is logged as an error."""
        views = [ways.plain, idempotent(ways.plain)]

        @wraps(views[1])
        def either(request: HttpRequest) -> HttpResponse:
            return views["X-Protected" in request.headers](request)

        served(either)
        client: Any = alice
        if asynchronous:
            client = AsyncClient()
            client.cookies = alice.cookies

        def send(**headers: str) -> HttpResponse:
            sent = post(client, "/x/", new_key(), headers=headers)
            return asyncio.run(sent) if asynchronous else sent  # type: ignore[arg-type]

        assert send(**{"X-Protected": "1"}).status_code == 201
        assert unprotected == []
        assert send().status_code == 201
        [logged] = unprotected
        assert "either is not protected: it responded to POST /x/ with 201" in logged.getMessage()
        unprotected.clear()


# Views of frameworks that have no adapter, each as its framework writes it.


OPERATION = """
def get_view(work):
    def sync_view_wrapper(request, *args, **kwargs):
        return work(request)

    return sync_view_wrapper
"""
DISPATCH = """
class GraphQLView(View):
    work = None

    def dispatch(self, request, *args, **kwargs):
        return self.work(request)
"""
METHOD = """
class Resource:
    def __init__(self, work):
        self.work = work

    def dispatch_list(self, request, **kwargs):
        return self.work(request)
"""


def of(module: str, source: str) -> dict[str, Any]:
    """What the source defines, as if it were in that module."""
    names: dict[str, Any] = {"__name__": module, "View": View}
    exec(source, names)
    return names


class ProjectView(of("strawberry.django.views", DISPATCH)["GraphQLView"]):  # type: ignore[misc]
    """A project's subclass of a framework's view."""


FRAMEWORKS: dict[str, Any] = {
    "ninja_extra": of("ninja_extra.x", OPERATION)["get_view"](ways.plain),
    "strawberry": csrf_exempt(ProjectView.as_view(work=ways.plain)),
    "tastypie": of("tastypie.resources", METHOD)["Resource"](ways.plain).dispatch_list,
}


@pytest.mark.django_db
@pytest.mark.parametrize("package", FRAMEWORKS)
def test_other_frameworks(package: str, alice: Client, settings: Any, caplog: Any) -> None:
    """A request with a key is refused before anything is executed; the log has the way out."""
    settings.MIDDLEWARE = ways.MIDDLEWARE
    route = path("api/<int:version>/", FRAMEWORKS[package])
    settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [route]})
    assert_problem(post(alice, "/api/1/", new_key()), 400, "key-unsupported")
    assert f"is a view of {package}" in caplog.text
    assert "list the paths that the middleware protects" in caplog.text
    assert effects() == 0


def test_way_out_of_other_frameworks() -> None:
    """Where ``@idempotent`` is refused, it names what protects the work."""
    with pytest.raises(ImproperlyConfigured, match=r"idempotent_call\(\)"):
        idempotent(FRAMEWORKS["strawberry"])


# Whatever protects a view: one caller's response is stored, and nobody else receives it.


every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
with_tokens = pytest.mark.parametrize(
    "way", [way for way in WAYS if way.tokens], ids=lambda way: way.name
)


@pytest.fixture
def below_the_middleware(settings: Any) -> None:
    """As most projects have it."""
    settings.MIDDLEWARE = ways.MIDDLEWARE


@pytest.fixture
def users() -> dict[str, User]:
    """Alice and Bob, who may both do it."""
    allowed = Permission.objects.get(codename=ways.PERMISSION.partition(".")[2])
    made = {name: User.objects.create_user(name) for name in ("alice", "bob")}
    for user in made.values():
        user.user_permissions.add(allowed)
    return made


def by_session(way: Way, key: str, user: User | None) -> HttpResponse:
    client = Client()
    if user is not None:
        client.force_login(user)
    return post(client, way.path, key)


def by_header(way: Way, key: str, authorization: str | None) -> HttpResponse:
    headers = {} if authorization is None else {"Authorization": authorization}
    return post(Client(), way.path, key, headers=headers)


def assert_nothing_given_away(response: HttpResponse) -> None:
    assert not is_replay(response), response.content
    assert b"alice" not in response.content


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("below_the_middleware")
@every_way
def test_sessions(way: Way, users: dict[str, User]) -> None:
    """Another user, and nobody at all, are not given the response of the first."""
    key = new_key()
    first = by_session(way, key, users["alice"])
    assert (first.status_code, first.json()["by"]) == (201, "alice")
    assert is_replay(by_session(way, key, users["alice"]))
    assert_nothing_given_away(by_session(way, key, users["bob"]))
    assert_nothing_given_away(by_session(way, key, None))
    assert is_replay(by_session(way, key, users["alice"]))


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("below_the_middleware")
@with_tokens
def test_tokens(way: Way, users: dict[str, User]) -> None:
    """Nor are another token, a rejected one, and a request without."""
    key = new_key()
    tokens = {name: f"Token {Token.objects.create(user=user)}" for name, user in users.items()}
    assert by_header(way, key, tokens["alice"]).status_code == 201
    assert is_replay(by_header(way, key, tokens["alice"]))
    for other in (tokens["bob"], "Token rejected", "nonsense", None):
        assert_nothing_given_away(by_header(way, key, other))
    Token.objects.get(user=users["alice"]).delete()
    assert_nothing_given_away(by_header(way, key, tokens["alice"]))


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("below_the_middleware")
@every_way
def test_credentials_that_nobody_knows(way: Way, users: dict[str, User]) -> None:
    """Where no user is known, whatever credentials were presented are whose response it is."""
    key = new_key()
    first = by_header(way, key, "Bearer opaque-1")
    if first.status_code != 201:  # the view asks for a user
        assert effects() == 0
        return
    assert is_replay(by_header(way, key, "Bearer opaque-1"))
    for other in ("Bearer opaque-2", None):
        assert_nothing_given_away(by_header(way, key, other))
    assert effects() == 1
