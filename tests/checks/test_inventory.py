"""The inventory: every route, what protects it and why not; and the checks that read it."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import pytest
from django.contrib import admin
from django.core.checks import WARNING, CheckMessage, run_checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import include, path, re_path
from django.utils.decorators import method_decorator
from django.views.generic import View
from django.views.i18n import set_language
from rest_framework import routers, viewsets
from rest_framework.decorators import action, api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.urlpatterns import format_suffix_patterns
from rest_framework.views import APIView

from idempotency_django.checks import readable_route
from idempotency_django.checks.inventory import endpoint_of, endpoints
from idempotency_django.decorators import idempotency_exempt, idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.http.declared import is_covered
from idempotency_django.http.invocations import name_of_route
from idempotency_django.policy import PAYMENT, Policy
from tests.models import Effect
from tests.support import ways
from tests.support.shared import is_replay, new_key, post

POLICY = Policy(required=True)
NOWHERE = Policy(store="nope")


def plain(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    return HttpResponse(status=201)


def view(**attributes: Any) -> Any:
    """A function view with these attributes."""

    function = ways.copied(plain)
    function.__dict__.update(attributes)
    return function


def post_(self: Any, request: Any) -> Any:
    return plain(request)


def post_number(self: Any, request: Any, pk: str) -> Any:
    return plain(request)


def a_class(**attributes: Any) -> Any:
    return type("AClass", (View,), {"post": post_, **attributes})


class Charges(IdempotentViewMixin, viewsets.ViewSet):
    authentication_classes = ()
    idempotency_policy = PAYMENT
    idempotency_policies = {"preview": None, "pay": POLICY}

    def create(self, request: Request) -> Response:
        return Response()

    def destroy(self, request: Request, pk: str) -> Response:
        return Response()

    @action(detail=True, methods=["post"])
    def pay(self, request: Request, pk: str) -> Response:
        return Response()

    @action(detail=False, methods=["post"])
    def preview(self, request: Request) -> Response:
        return Response()


class Unprotected(viewsets.ViewSet):
    def create(self, request: Request) -> Response:
        return Response()


class Mixed(IdempotentViewMixin, APIView):
    def post(self, request: Request) -> Response:
        return Response()


CREATE = {"post": "create"}


class Orders(APIView):
    @idempotent(policy=POLICY)
    def post(self, request: Request) -> Response:
        return Response()

    def put(self, request: Request) -> Response:
        return Response()


@api_view(["POST"])
@idempotent(policy=POLICY)
def below(request: Request) -> Response:
    return Response()


router = routers.SimpleRouter()
router.register("charges", Charges, basename="charge")


def served(*patterns: Any) -> Any:
    return type("urls", (), {"urlpatterns": list(patterns)})


@pytest.fixture
def found(settings: Any) -> Any:
    """What the inventory finds in these URLs, below the middleware."""

    def find(*patterns: Any, middleware: bool = True) -> list[tuple[Any, ...]]:
        settings.MIDDLEWARE = ways.MIDDLEWARE if middleware else []
        settings.ROOT_URLCONF = served(*patterns)
        return [(e.route, e.method, e.policy, e.how) for e in endpoints()]

    return find


def said(number: str) -> list[CheckMessage]:
    """What the checks say under this id."""
    return [m for m in run_checks() if m.id == f"idempotency_django.{number}"]


class TestEndpoints:
    """Each endpoint, with the policy that is enforced."""

    def test_viewset(self, found: Any) -> None:
        """Each action of a viewset, with its own policy, under a route without expressions."""
        assert found(path("api/", include(router.urls))) == [
            ("/api/charges/", "POST", PAYMENT, "mixin"),
            ("/api/charges/preview/", "POST", None, "exempt"),
            ("/api/charges/{pk}/", "DELETE", PAYMENT, "mixin"),
            ("/api/charges/{pk}/pay/", "POST", POLICY, "mixin"),
        ]

    @pytest.mark.parametrize(
        "way",
        [
            ways.of_anything(idempotent(policy=POLICY)(view())),
            idempotent(policy=POLICY)(ways.harmless(view())),
            ways.guard(a_class(post=idempotent(policy=POLICY)(post_)).as_view()),
            a_class(post=method_decorator(ways.guard)(idempotent(policy=POLICY)(post_))).as_view(),
            ways.api(ways.guard, idempotent(policy=POLICY)),
        ],
    )
    @pytest.mark.parametrize("middleware", [True, False])
    def test_decorator(self, found: Any, way: Any, middleware: bool) -> None:
        """Wherever ``@idempotent`` is, its policy is seen."""
        [(_, method, policy, how)] = found(path("x/", way), middleware=middleware)
        assert (method in ("POST", "*"), policy, how) == (True, POLICY, "decorator")

    def test_names(self, found: Any) -> None:
        """Each view has a dotted name of its own, also the function of an ``@api_view``."""
        found(path("a/", below), path("b/", Orders.as_view()), path("c/", plain))
        names = dict.fromkeys(each.view_name for each in endpoints())
        assert list(names) == [f"{__name__}.{name}" for name in ("below", "Orders", "plain")]

    def test_handler(self, found: Any) -> None:
        """A handler with a decorator of its own is seen apart from its neighbours."""
        patterns = [re_path(r"^orders/(?P<number>\d+)/$", Orders.as_view())]
        protected, other = found(*patterns)
        assert protected == ("/orders/{number}/", "POST", POLICY, "decorator")
        assert other[1:2] + other[3:] == ("PUT", "middleware")
        assert [e[3] for e in found(*patterns, middleware=False)] == ["decorator", ""]

    @pytest.mark.parametrize("by", [IdempotentViewMixin, None])
    def test_without_a_policy(self, found: Any, by: Any) -> None:
        """A view, or an action by name, without a policy was left out on purpose; an action that
        is not among those with one may have been forgotten.
        """

        def shown(**attributes: Any) -> list[str]:
            bases = (by, viewsets.ViewSet) if by is IdempotentViewMixin else (viewsets.ViewSet,)
            names = {name: Charges.__dict__[name] for name in ("create", "preview")}
            made: Any = type("Made", bases, {**names, **attributes})
            view = made.as_view({"post": "create"}), made.as_view({"post": "preview"})
            return [e[3] for e in found(path("x/", view[0]), path("y/", view[1]))]

        way = "mixin" if by else "middleware"
        policies = {"idempotency_policies": {"create": POLICY, "preview": None}}
        assert shown(idempotency_policy=None, **policies) == [way, "exempt"]
        policies = {"idempotency_policies": {"create": POLICY}}
        assert shown(idempotency_policy=None, **policies) == [way, ""]
        assert shown(idempotency_policy=None) == ["exempt", "exempt"]

    def test_policies_of_as_view(self, found: Any) -> None:
        """What ``as_view()`` gives the view counts more than the class."""
        one, two = {"idempotency_policy": POLICY}, {"idempotency_policies": {"create": None}}
        for made, expected in [
            (Charges.as_view(CREATE, **one), (POLICY, "mixin")),
            (Charges.as_view(CREATE, **two), (None, "exempt")),
            (Charges.as_view(CREATE, idempotency_policy=None), (None, "")),  # beside its policies
            (Mixed.as_view(idempotency_policy=None), (None, "exempt")),
            (a_class(idempotency_policy=None).as_view(**one), (POLICY, "middleware")),
        ]:
            assert found(path("x/", made))[0][2:] == expected

    def test_methods_that_a_class_does_not_have(self, found: Any) -> None:
        """What ``http_method_names`` leaves out gets a 405, so it is no endpoint."""
        several = a_class(put=post_, delete=post_)
        for view in (
            several.as_view(http_method_names=["get", "post"]),
            type("Fewer", (several,), {"http_method_names": ("post",)}).as_view(),
        ):
            assert [each[1] for each in found(path("x/", view))] == ["POST"]

    def test_odd_callables(self, found: Any) -> None:
        """A view may be any callable, also one that has no hash, or a ``cls`` that is no class."""

        class Odd:
            __hash__ = None  # type: ignore[assignment]

            def __call__(self, request: HttpRequest) -> HttpResponse:
                return plain(request)

        named = view(cls="shop", initkwargs=None)
        routes = path("odd/", Odd()), path("named/", named)
        assert [e[0] for e in found(*routes, middleware=False)] == ["/odd/", "/named/"]
        run_checks()

    def test_format_suffixes(self, found: Any) -> None:
        """A route with a suffix is another name of the one without, where there is one."""
        patterns = [path("orders/", Orders.as_view()), path("pay", below)]
        expected = found(*patterns)
        assert found(*format_suffix_patterns(patterns)) == expected
        assert len(found(*format_suffix_patterns(patterns, suffix_required=True))) == len(expected)
        assert len(found(*patterns, path("orders.<str:format>", ways.api()))) == len(expected) + 1
        assert len(found(*patterns, path("pay/<str:format>/", below))) == len(expected) + 1
        bare = path("mixed.<str:format>", Mixed.as_view(idempotency_policy=None))
        assert [e[3] for e in found(path("mixed", Mixed.as_view()), bare)] == ["mixin", "exempt"]

    def test_admin(self, found: Any) -> None:
        """The views of the admin take no keys, and no warning says so: none will come."""
        users = include("django.contrib.auth.urls")
        found(path("admin/", admin.site.urls), path("users/", users), path("i18n/", set_language))
        everything = list(endpoints())
        assert len(everything) > 10
        assert any(e.problem for e in everything)
        assert not said("W023")


class TestChecks:
    """The system checks see every view, however it is protected."""

    @pytest.mark.parametrize(
        "way",
        [
            a_class(post=idempotent(policy=NOWHERE)(post_)).as_view(),
            api_view(["POST"])(idempotent(policy=NOWHERE)(plain)),
            view(idempotency_policy=NOWHERE),
        ],
    )
    def test_unknown_store(self, found: Any, way: Any) -> None:
        """E003: a policy that names a store which does not exist, said once for all its routes."""
        found(path("x/", way), path("y/", way))
        [message] = said("E003")
        assert "has no store 'nope'" in message.msg

    def test_promise(self, found: Any) -> None:
        """E020: a policy of a decorator that asks for what the project has not."""
        found(path("x/", idempotent(on_conflict="accepted")(view())))
        assert len(said("E020")) == 1

    @pytest.mark.parametrize("refusal", ways.REFUSED, ids=lambda refusal: refusal.name)
    def test_refused(self, found: Any, refusal: ways.Refusal) -> None:
        """W023: a view that would refuse each request with a key; E022, if it has a policy."""
        try:
            made = refusal.make()
        except ImproperlyConfigured:
            return  # refused when it is decorated
        found(path("x/<int:pk>/", made))
        [warning] = said("W023")
        assert "cannot protect 1 view without a policy" in warning.msg
        [problem] = {endpoint.problem for endpoint in endpoints()}
        assert (refusal.says or "tests.support.ways.") in problem
        assert (said("E022"), {endpoint.how for endpoint in endpoints()}) == ([], {"middleware"})

    def test_refused_with_a_policy(self, found: Any) -> None:
        """E022: a view that declares a policy, and cannot be protected."""
        made = ways.guard(view(idempotency_policy=POLICY))
        found(path("x/<int:pk>/", made))
        [message] = said("E022")
        assert f"directly above the function {__name__}.plain" in message.msg
        assert str(message.hint).startswith("It serves /x/{pk}/. Change the view as")
        assert "@idempotency_exempt" in str(message.hint)
        assert said("W023") == []

    @pytest.mark.parametrize("way", ways.WAYS, ids=lambda way: way.name)
    def test_nothing_is_said_of_what_works(self, found: Any, way: ways.Way) -> None:
        """No way that works is reported, with the middleware and without it."""
        found(path("x/", way.view))
        assert [m for m in run_checks() if str(m.id).startswith("idempotency_django.E02")] == []

    @pytest.mark.parametrize(
        ("name", "value"),
        [("idempotency_policy", {"ttl": 1}), ("idempotency_policies", {"post": {"ttl": 1}})],
    )
    def test_wrong_policy(self, found: Any, client: Client, name: str, value: Any) -> None:
        """E022: no policy at all, on a view whose requests are refused with the same words."""
        body = {"post": post_, "authentication_classes": (), name: value}
        made = type("Orders", (IdempotentViewMixin, APIView), body)
        found(path("x/", made.as_view()), middleware=False)
        [message] = said("E022")
        assert "is a dict; it must be a Policy or None." in message.msg
        with pytest.raises(ImproperlyConfigured, match="is a dict; it must be a Policy or None"):
            client.post("/x/", headers={"Idempotency-Key": new_key()})

    def test_policies_that_are_no_dict(self, found: Any) -> None:
        """E022: an ``idempotency_policies`` that is a list."""
        found(path("x/", a_class(idempotency_policies=[POLICY]).as_view()))
        [message] = said("E022")
        assert "is a list; it must be a dict of policies by action." in message.msg

    @pytest.mark.parametrize(
        "made",
        [
            lambda: view(idempotency_policy=POLICY),
            lambda: a_class(idempotency_policies={"post": POLICY}).as_view(),
            lambda: type("A", (APIView,), {"post": post_, "idempotency_policy": POLICY}).as_view(),
            lambda: type("V", (Unprotected,), {"idempotency_policies": {"create": POLICY}}).as_view(
                CREATE
            ),
        ],
    )
    def test_policy_that_nothing_reads(self, found: Any, made: Any) -> None:
        """E060: a view declares a policy, and no mixin, decorator or middleware protects it."""
        made = made()
        found(path("x/", made), path("y/", made), middleware=False)
        [message] = said("E060")
        assert "has an idempotency policy, but is not protected" in message.msg
        assert message.msg.startswith("tests.checks.test_inventory.")
        for way in ("IdempotentViewMixin", "@idempotent(policy=…)", "IdempotencyMiddleware"):
            assert way in str(message.hint)
        found(path("x/", made), path("y/", made))
        assert said("E060") == []

    def test_leased_under_atomic_requests(
        self, found: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """E062: a claim that could not be committed within the request's transaction."""
        leased, usual = idempotent(mode="leased")(view()), idempotent(view())
        marked = transaction.non_atomic_requests(idempotent(mode="leased")(view()))
        found(path("a/", leased), path("b/", usual), path("c/", marked), middleware=False)
        assert said("E062") == []
        monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
        [message] = said("E062")
        assert "is in the leased mode, but ATOMIC_REQUESTS" in message.msg
        assert "It serves /a/. Mark the view with transaction.non_atomic" in str(message.hint)

    def test_policies_that_are_read(self, found: Any) -> None:
        """E060 leaves alone what is protected, exempt, of another action, or declares ``None``."""
        found(
            path("a/", include(router.urls)),
            path("c/", view(idempotency_policy=None)),
            path("d/", idempotency_exempt(view(idempotency_policy=POLICY))),
            path("e/", a_class(idempotency_policies={"delete": POLICY}).as_view()),
            path("f/", a_class(post=idempotent(post_), idempotency_policy=POLICY).as_view()),
            path("g/", view()),
            middleware=False,
        )
        assert said("E060") == []


OWN = "/own/"
BY_PREFIX = {"/api/orders/", "/api/17/"}
BY_NAMESPACE = {"/shop/carts/", "/shop/v1/carts/", "/shop/v1/items/"}


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("unsafe", {*BY_PREFIX, *BY_NAMESPACE, "/apiary/", "/admin/v1/", OWN}),
        ("with-policy", {OWN}),
        (["/"], {*BY_PREFIX, *BY_NAMESPACE, "/apiary/", "/admin/v1/", OWN}),
        (["/api/"], {*BY_PREFIX, OWN}),
        (["/api"], {*BY_PREFIX, "/apiary/", OWN}),
        (("/api/orders/",), {"/api/orders/", OWN}),
        (["shop"], {*BY_NAMESPACE, OWN}),
        (["shop:v1"], {"/shop/v1/carts/", "/shop/v1/items/", OWN}),
        (["v1"], {"/shop/v1/carts/", "/shop/v1/items/", "/admin/v1/", OWN}),
        (["shop:v1", "/apiary/"], {"/shop/v1/carts/", "/shop/v1/items/", "/apiary/", OWN}),
        (["sho", "v1:shop", "/shop/v2/", "api"], {OWN}),
    ],
    ids=lambda value: str(sorted(value)),
)
def test_middleware_protects(
    client: Client, found: Any, settings: Any, chosen: Any, expected: set[str]
) -> None:
    """What the inventory calls protected is what the middleware protects."""
    settings.IDEMPOTENCY = {"MIDDLEWARE_PROTECTS": chosen}
    carts = [path("carts/", view()), path("items/", Unprotected.as_view(CREATE))]
    shop = [carts[0], path("v1/", include((carts, "v1")))]
    listed = found(
        path(
            "api/", include([path("orders/", view()), path("exempt/", idempotency_exempt(view()))])
        ),
        re_path(r"^api/(?P<pk>\d+)/$", a_class(post=post_number).as_view()),
        path("apiary/", view()),
        path("shop/", include((shop, "shop"))),
        path("admin/", include(([path("v1/", view())], "v1"))),
        path("own/", view(idempotency_policy=Policy())),
    )
    requests = {route: route.replace("{pk}", "17") for route, *_ in listed}
    shown = {requests[route] for route, _, _, how in listed if how == "middleware"}
    replayed = set()
    for sent in requests.values():
        key = new_key()
        assert not is_replay(post(client, sent, key))
        if is_replay(post(client, sent, key)):
            replayed.add(sent)
    assert shown == replayed == expected
    by_view = {endpoint.route: endpoint for endpoint in endpoints()}
    for route, endpoint in by_view.items():
        assert endpoint_of(endpoint.view, "POST", route).how == endpoint.how  # type: ignore[union-attr]


numbers = count()


def refused_view(module: str, **attributes: Any) -> Any:
    """Another view that cannot be protected, and handles two methods."""

    def post(self: Any, request: Any) -> Any: ...

    unknown = partial(post, None)
    body = {"post": unknown, "put": unknown, "__module__": module, **attributes}
    return type(f"Refused{next(numbers)}", (View,), body).as_view()


def test_many_refused(found: Any, settings: Any) -> None:
    """W023: one warning counts them by module; E022: each that declares a policy is an error."""
    views = [refused_view("shop.api") for _ in range(3)]
    views += [refused_view("shop.views") for _ in range(8)]  # more, so they are named first
    views += [refused_view(f"shop.app{n}", idempotency_policy=PAYMENT) for n in range(2)]
    found(*(path(f"{n}/{part}/", each) for n, each in enumerate(views) for part in "ab"))
    [warning] = said("W023")
    assert warning.level == WARNING
    assert "cannot protect 11 views without a policy" in warning.msg
    assert warning.msg.endswith("shop.views (8), shop.api (3).")
    assert "IDEMPOTENCY['MIDDLEWARE_PROTECTS'] = ['/api/']" in str(warning.hint)
    assert "idempotency_report" in str(warning.hint)
    assert {str(m.hint).split("/")[1] for m in said("E022")} == {"11", "12"}
    settings.IDEMPOTENCY = {"MIDDLEWARE_PROTECTS": ["/api/"]}
    assert said("W023") == []
    assert {str(m.hint).split("/")[1] for m in said("E022")} == {"11", "12"}


class TestNoRoute:
    """W071: a prefix or namespace that protects nothing."""

    @pytest.mark.parametrize("chosen", ["/apii/", "shopp"])
    def test_warned(self, found: Any, settings: Any, chosen: str) -> None:
        """A misspelt name would leave its views unprotected, so it is reported."""
        settings.IDEMPOTENCY = {"MIDDLEWARE_PROTECTS": ["/api/", chosen]}
        found(path("api/x/", view()))
        [message] = said("W071")
        assert repr(chosen) in message.msg

    @pytest.mark.parametrize("chosen", ["/api/", "/api/x/", "/", "shop"])
    def test_known(self, found: Any, settings: Any, chosen: str) -> None:
        """A prefix of a route and the namespace of an include are fine."""
        settings.IDEMPOTENCY = {"MIDDLEWARE_PROTECTS": [chosen]}
        found(path("api/x/", view()), path("s/", include(([path("y/", view())], "shop"))))
        assert said("W071") == []


@pytest.mark.parametrize(
    ("path_info", "covered"),
    [("/api/x/", True), ("/de/api/x/", True), ("/de-at/api/x/", True), ("/xx/api/x/", False)],
)
def test_prefixes_in_each_language(settings: Any, path_info: str, covered: bool) -> None:
    """A prefix covers the same view in each language of ``i18n_patterns()``."""
    settings.LANGUAGES = [("en", "English"), ("de", "German")]
    settings.IDEMPOTENCY = {"MIDDLEWARE_PROTECTS": ["/api/"]}
    assert is_covered(path_info, []) is covered


ROUTES = {
    "orders/<int:pk>/pay/": ("/orders/{pk}/pay/", "/orders/<int:pk>/pay/"),
    "files/<path:name>": ("/files/{name}", "/files/<path:name>"),
    "<path:folder>/^(?P<pk>\\d+)$": ("/{folder}/{pk}", None),
    "<unknown:name>/": ("/{name}/", "/<unknown:name>/"),
    "": ("/", "/"),
    "api/^charges/$": ("/api/charges/", "/api/charges/"),
    "^charges/(?P<pk>[^/.]+)/$": ("/charges/{pk}/", "/charges/{pk}/"),
    "^charges/(?P<pk>\\d+)/$": ("/charges/{pk}/", None),
    "^charges/(\\d+)/$": ("/charges/{var}/", None),
    "<str:tenant>/^charges\\.(?P<format>[a-z0-9]+)/?$": ("/{tenant}/charges.{format}/", None),
}


@pytest.mark.parametrize("route", ROUTES)
def test_routes(route: str) -> None:
    """A route is shown without a regular expression, and named as a router or a person wrote it."""
    shown, name = ROUTES[route]
    assert readable_route(route) == shown
    assert name_of_route(route) == (name or f"/{route}")


def test_distinct_routes_have_distinct_names() -> None:
    """The name is part of the default scope, so no two routes share one."""
    assert len({name_of_route(route) for route in ROUTES}) == len(ROUTES)
