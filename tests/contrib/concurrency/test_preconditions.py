"""A change is executed only if the resource is still what the client has read."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, transaction
from django.db.transaction import TransactionManagementError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.test import Client
from django.urls import include, path
from django.views.decorators.cache import never_cache
from rest_framework import generics, routers, serializers, viewsets
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import action
from rest_framework.exceptions import NotAuthenticated
from rest_framework.permissions import BasePermission
from rest_framework.renderers import BrowsableAPIRenderer, JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.contrib.concurrency import PreconditionMixin, preconditions, transition
from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.stores.records import Status
from idempotency_django.testing.contract import in_threads
from tests.contrib.concurrency.models import Base, Country, Owner, Ticket
from tests.support.shared import assert_problem, assert_replays, is_replay

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]
CHANGES = {"PUT", "PATCH", "DELETE"}
THREADS = 30


class TicketSerializer(serializers.ModelSerializer):
    class Meta:
        model = Ticket
        fields = ("id", "title", "version")
        read_only_fields = ("version",)


class Tickets(viewsets.ModelViewSet):
    """What the views below have in common; each change leaves a trace."""

    authentication_classes: Any = []
    queryset = Ticket.objects.order_by("pk")
    serializer_class = TicketSerializer
    require_preconditions = CHANGES

    def perform_update(self, serializer: Any) -> None:
        Owner.objects.create(name=None)
        serializer.save()

    def perform_destroy(self, instance: Ticket) -> None:
        Owner.objects.create(name=None)
        instance.delete()

    @action(detail=True, methods=["post"])
    def pay(self, request: Request, pk: str) -> Response:
        """A POST that is conditional where the client wants it."""
        ticket = self.get_object()
        transition(ticket, "pending", "paid", effect=lambda _: Owner.objects.create(name=None))
        return Response(self.get_serializer(ticket).data)


class First(PreconditionMixin, IdempotentViewMixin, Tickets):
    """Preconditions come first among the bases."""


class Second(IdempotentViewMixin, PreconditionMixin, Tickets):
    """Idempotency comes first."""


class Below(PreconditionMixin, Tickets):
    """The middleware protects it from duplicates."""


class Leased(PreconditionMixin, IdempotentViewMixin, Tickets):
    idempotency_policy = Policy(mode="leased")


class Marked(PreconditionMixin, Tickets):
    """It catches an error of the database, which has marked the transaction by then."""

    def perform_update(self, serializer: Any) -> None:
        super().perform_update(serializer)
        for _ in range(2):
            with suppress(IntegrityError):
                Owner.objects.create(name="twice")


class Borrowing(PreconditionMixin, Tickets):
    """Its actions show, and change, objects at whose URL they are not."""

    @action(detail=True, methods=["get", "put", "post"])
    def country(self, request: Request, pk: str) -> Response:
        self.get_object()
        country = Country.objects.get()
        if request.method != "GET":
            country.name = "changed"
            country.save()
        return Response(CountrySerializer(country).data)

    @action(detail=True)
    def another(self, request: Request, pk: str) -> Response:
        return Response(self.get_serializer(Ticket.objects.exclude(pk=pk).get()).data)

    @action(detail=False)
    def latest(self, request: Request) -> Response:
        return Response(self.get_serializer(Ticket.objects.latest("pk")).data)


class CountrySerializer(serializers.ModelSerializer):
    class Meta:
        model = Country
        fields = ("code", "name")


class Shown(PreconditionMixin, IdempotentViewMixin, Tickets):
    """JSON, and a page of the browsable API."""

    renderer_classes = [JSONRenderer, BrowsableAPIRenderer]


class Titled(PreconditionMixin, IdempotentViewMixin, Tickets):
    """Its URLs name tickets by what may be given to another one."""

    lookup_field = "title"


class Mine(PreconditionMixin, Tickets):
    """Its URL names no ticket."""

    def get_object(self) -> Ticket:
        return Ticket.objects.get()


class Owned(BasePermission):
    """Nobody may have what is called secret."""

    def has_object_permission(self, request: Request, view: Any, obj: Ticket) -> bool:
        return obj.title != "secret"


class Refusing(BaseAuthentication):
    def authenticate(self, request: Request) -> Any:
        if "Authorization" not in request.headers:
            raise NotAuthenticated
        return User.objects.get_or_create(username="alice")[0], None

    def authenticate_header(self, request: Request) -> str:
        return "Token"


class Guarded(PreconditionMixin, IdempotentViewMixin, Tickets):
    authentication_classes = [Refusing]
    permission_classes = [Owned]


class ByHand(PreconditionMixin, APIView):
    """A view that finds nothing by its URL."""

    authentication_classes: Any = []
    require_preconditions = {"PUT"}

    def put(self, request: Request, pk: int) -> Response:
        return Response({})

    patch = put
    post = put


class HandlerDecorated(PreconditionMixin, IdempotentViewMixin, generics.UpdateAPIView):
    queryset = Ticket.objects.all()
    serializer_class = TicketSerializer
    authentication_classes: Any = []

    @idempotent
    def put(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        return self.update(request, *args, **kwargs)


class Unversioned(PreconditionMixin, generics.UpdateAPIView):
    queryset = Base.objects.all()
    authentication_classes: Any = []
    require_preconditions = {"PUT"}


def ticket_of(request: HttpRequest, pk: int) -> Ticket:
    return get_object_or_404(Ticket, pk=pk)


def change(request: HttpRequest, pk: int) -> HttpResponse:
    ticket = get_object_or_404(Ticket, pk=pk)
    if request.method == "DELETE":
        ticket.delete()
        return HttpResponse(status=204)
    if request.method == "PUT":
        Owner.objects.create(name=None)
        ticket.title = json.loads(request.body)["title"]
        ticket.save()
    return JsonResponse({"title": ticket.title, "version": ticket.version})


def marked(request: HttpRequest, pk: int) -> HttpResponse:
    """A view whose changes are rolled back without an error."""
    response = change(request, pk)
    transaction.set_rollback(True)
    response.status_code = int(request.headers.get("Status", "200"))
    response["ETag"] = '"2"'  # so that nobody looks the object up
    return response


plain_middleware = preconditions(ticket_of)(change)
plain = idempotent(preconditions(ticket_of)(change))


plain_marked = preconditions(ticket_of)(marked)


@preconditions(lambda request, title: get_object_or_404(Ticket, title=title))
def plain_titled(request: HttpRequest, title: str) -> HttpResponse:
    return change(request, Ticket.objects.get(title=title).pk)


router = routers.SimpleRouter()
VIEWSETS = {
    "first": First,
    "second": Second,
    "middleware": Below,
    "leased": Leased,
    "guarded": Guarded,
    "marked": Marked,
    "borrowing": Borrowing,
    "shown": Shown,
    "titled": Titled,
}
for name, viewset in VIEWSETS.items():
    router.register(name, viewset, name)
urlpatterns = [
    path("", include(router.urls)),
    path("byhand/<int:pk>/", ByHand.as_view()),
    path("handler/<int:pk>/", HandlerDecorated.as_view()),
    path("unversioned/<int:pk>/", Unversioned.as_view()),
    path("mine/<str:any>/", Mine.as_view({"get": "retrieve", "put": "update"})),
    path("plain_titled/<str:title>/", plain_titled),
    path("plain/<int:pk>/", plain),
    path("plain_middleware/<int:pk>/", plain_middleware),
    path("plain_marked/<int:pk>/", plain_marked),
]

PROTECTED = ["first", "second", "leased", "middleware", "plain", "plain_middleware"]
protected = pytest.mark.parametrize("at", PROTECTED)


@pytest.fixture(autouse=True)
def _middleware(settings: Any) -> None:
    settings.MIDDLEWARE = ["idempotency_django.middleware.IdempotencyMiddleware"]


@pytest.fixture
def ticket() -> Ticket:
    return Ticket.objects.create(title="a")


def send(at: str, ticket: Any, method: str = "put", title: str = "b", **headers: str) -> Any:
    """A request for a ticket, with headers by their names in Python."""
    client = Client(raise_request_exception=False)
    key = ticket if isinstance(ticket, str | int) else ticket.pk
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = "" if method in {"get", "head", "delete"} else json.dumps({"title": title})
    return client.generic(
        method.upper(), f"/{at}/{key}/", body, content_type="application/json", headers=named
    )


def etag(ticket: Ticket, version: int) -> str:
    return f'"{ticket.pk}.{version}"'


def effects() -> int:
    return Owner.objects.count()


class TestChanges:
    @protected
    def test_current(self, ticket: Ticket, at: str) -> None:
        """With the current ETag it is executed, and the response has the next one."""
        response = send(at, ticket, If_Match=etag(ticket, 1))
        assert (response.status_code, response["ETag"]) == (200, etag(ticket, 2))
        assert (Ticket.objects.get().title, effects()) == ("b", 1)

    @protected
    def test_stale(self, ticket: Ticket, at: str) -> None:
        """With another ETag it is refused, and nothing is executed."""
        ticket.save()
        for header in (etag(ticket, 1), f"W/{etag(ticket, 2)}"):
            response = send(at, ticket, If_Match=header)
            assert_problem(response, 412, "precondition-failed")
        assert (Ticket.objects.get().title, effects()) == ("a", 0)

    @protected
    def test_delete(self, ticket: Ticket, at: str) -> None:
        """A stale delete is refused, a current one executed; there is no ETag of nothing."""
        assert send(at, ticket, "delete", If_Match=etag(ticket, 7)).status_code == 412
        response = send(at, ticket, "delete", If_Match=etag(ticket, 1))
        assert (response.status_code, response.headers.get("ETag")) == (204, None)
        assert send(at, ticket, "delete", If_Match=etag(ticket, 1)).status_code == 404

    @protected
    def test_required(self, ticket: Ticket, at: str) -> None:
        """What is required is a condition that says what the client has read."""
        date = "Sat, 29 Oct 1994 19:43:31 GMT"
        blind = [{}, {"If_None_Match": etag(ticket, 1)}, {"If_None_Match": "*"}]
        blind.append({"If_Modified_Since": date})
        blind.append({"If_Unmodified_Since": date})  # within that second it may have changed
        for headers in blind:
            assert_problem(send(at, ticket, **headers), 428, "precondition-required")
        assert_problem(send(at, ticket, "delete"), 428, "precondition-required")
        assert send(at, ticket, If_Match="").status_code == 412
        assert (Ticket.objects.get().title, effects()) == ("a", 0)

    @protected
    def test_if_none_match(self, ticket: Ticket, at: str) -> None:
        """A change with the other condition is refused, whether it holds or not."""
        for header in ("*", etag(ticket, 1), etag(ticket, 7)):
            response = send(at, ticket, If_Match=etag(ticket, 1), If_None_Match=header)
            assert_problem(response, 412, "precondition-failed")
            assert "cannot have If-None-Match" in response.json()["detail"]
        assert (Ticket.objects.get().title, effects()) == ("a", 0)

    def test_optional(self, ticket: Ticket) -> None:
        """Where no condition is required, one that is sent counts nevertheless."""
        path = f"{ticket.pk}/pay"
        for headers in ({"If_Match": etag(ticket, 7)}, {"If_None_Match": etag(ticket, 7)}):
            assert send("first", path, "post", **headers).status_code == 412
        response = send("first", path, "post")
        assert (response.status_code, response["ETag"]) == (200, etag(ticket, 2))
        assert send("first", path, "post", If_Match=etag(ticket, 2)).status_code == 200
        assert effects() == 1


class TestRetries:
    @protected
    def test_replay(self, ticket: Ticket, at: str) -> None:
        """A retry of what succeeded gets its response, ETag included, and not 412; also a retry of
        a DELETE, whose object is gone by then.
        """
        headers = {"If_Match": etag(ticket, 1), "Idempotency_Key": str(uuid4())}
        first, second = (send(at, ticket, **headers) for _ in range(2))
        assert first["ETag"] == etag(ticket, 2)
        assert_replays(first, second)
        assert effects() == 1
        headers = {"If_Match": etag(ticket, 2), "Idempotency_Key": str(uuid4())}
        responses = [send(at, ticket, "delete", **headers) for _ in range(2)]
        assert [response.status_code for response in responses] == [204, 204]
        assert is_replay(responses[1])

    @protected
    def test_refusals_are_not_stored(self, ticket: Ticket, at: str) -> None:
        """412 and 428 free the key: with the right condition, the same key is executed."""
        key = str(uuid4())
        assert_problem(send(at, ticket, Idempotency_Key=key), 428, "precondition-required")
        stale = send(at, ticket, Idempotency_Key=key, If_Match=etag(ticket, 7))
        assert_problem(stale, 412, "precondition-failed")
        assert IdempotencyKey.objects.get().status == Status.FAILED
        assert send(at, ticket, Idempotency_Key=key, If_Match=etag(ticket, 1)).status_code == 200
        assert effects() == 1

    def test_authentication_comes_first(self, ticket: Ticket) -> None:
        """Neither a replay nor a condition is looked at before the caller is known."""
        headers = {"If_Match": etag(ticket, 1), "Idempotency_Key": str(uuid4())}
        assert send("guarded", ticket, **headers).status_code == 401
        headers["Authorization"] = "Token a"
        assert send("guarded", ticket, title="secret", **headers).status_code == 200
        # The object is another one's now: neither its replay nor its version is told.
        assert send("guarded", ticket, title="secret", **headers).status_code == 403
        headers["Idempotency_Key"] = str(uuid4())
        assert send("guarded", ticket, **headers).status_code == 403


class TestReads:
    @pytest.mark.parametrize("at", ["first", "second", "middleware", "plain", "plain_middleware"])
    @pytest.mark.parametrize("method", ["get", "head"])
    def test_etag(
        self, ticket: Ticket, at: str, method: str, django_assert_num_queries: Any
    ) -> None:
        """A read has the ETag, looks at no condition, and changes nothing."""
        with django_assert_num_queries(2 if "plain" in at else 1):
            conditions = {"If_Match": etag(ticket, 7), "If_None_Match": etag(ticket, 1)}
            response = send(at, ticket, method, **conditions)
        assert (response.status_code, response["ETag"]) == (200, etag(ticket, 1))

    @pytest.mark.parametrize("at", ["first", "second", "middleware", "plain", "plain_middleware"])
    def test_not_modified(self, ticket: Ticket, at: str, settings: Any) -> None:
        """With Django's middleware, who has the current representation gets 304."""
        settings.MIDDLEWARE = [
            "django.middleware.http.ConditionalGetMiddleware",
            *settings.MIDDLEWARE,
        ]
        for header in (etag(ticket, 1), f"W/{etag(ticket, 1)}"):
            response = send(at, ticket, "get", If_None_Match=header)
            assert (response.status_code, response.content) == (304, b"")
            assert response["ETag"] == etag(ticket, 1)
        assert send(at, ticket, "get", If_None_Match=etag(ticket, 7)).status_code == 200
        assert send(at, ticket, If_Match=etag(ticket, 1)).status_code == 200
        assert send(at, ticket, If_Match=etag(ticket, 1)).status_code == 412

    def test_page(self, ticket: Ticket) -> None:
        """A page of the browsable API holds its caller's name: it has no ETag."""
        page = send("shown", ticket, "get", Accept="text/html", If_None_Match=etag(ticket, 1))
        assert (page.status_code, page.headers.get("ETag")) == (200, None)
        assert b"<html" in page.content


class TestBirths:
    """What is deleted and created anew has another primary key, although its version is as low."""

    @pytest.mark.parametrize("at", ["titled", "plain_titled", "mine"])
    def test_other_names(self, at: str) -> None:
        """An ETag holds for one object, also where the URL does not name the primary key."""
        tags = []
        for _ in range(2):
            Ticket.objects.all().delete()
            Ticket.objects.create(title="a")
            tags.append(send(at, "a", "get")["ETag"])
        assert send(at, "a", title="a", If_Match=tags[0]).status_code == 412
        response = send(at, "a", title="a", If_Match=tags[1])
        assert response.status_code == 200
        assert send(at, "a", "get")["ETag"] == response["ETag"]

    def test_created(self) -> None:
        """The ETag of what a POST creates is the one of its own URL."""
        for at in ("first", "titled"):
            Ticket.objects.all().delete()
            created = Client().post(f"/{at}/", {"title": "a"})
            name = "a" if at == "titled" else created.json()["id"]
            assert created["ETag"] == send(at, name, "get")["ETag"]


class TestOthers:
    @pytest.fixture(autouse=True)
    def _country(self) -> None:
        Country.objects.create(code="DE", name="x")

    def test_read(self, ticket: Ticket) -> None:
        """An action that shows another object sends no ETag of it, and no 304 for it."""
        Ticket.objects.create(title="another", version=4)
        for name in ("country", "another"):
            for headers in ({}, {"If_None_Match": etag(ticket, 1)}, {"If_None_Match": "*"}):
                response = send("borrowing", f"{ticket.pk}/{name}", "get", **headers)
                assert (response.status_code, response.headers.get("ETag")) == (200, None)
        assert send("borrowing", "latest", "get").headers.get("ETag") is None

    @pytest.mark.parametrize("method", ["put", "post"])
    def test_change(self, ticket: Ticket, method: str) -> None:
        """A change of another object has the conditions of what get_object() finds, and no ETag."""
        at = f"{ticket.pk}/country"
        assert send("borrowing", at, method, If_Match=etag(ticket, 7)).status_code == 412
        assert Country.objects.get().name == "x"
        response = send("borrowing", at, method, If_Match=etag(ticket, 1))
        assert (response.status_code, response.headers.get("ETag")) == (200, None)


@pytest.mark.parametrize("at", ["marked", "plain_marked"])
def test_success_that_is_rolled_back(ticket: Ticket, at: str) -> None:
    """A success whose changes are rolled back is an error."""
    with pytest.raises(TransactionManagementError, match="marked for rollback"):
        Client().put(
            f"/{at}/{ticket.pk}/",
            json.dumps({"title": "b"}),
            content_type="application/json",
            headers={"If-Match": etag(ticket, 1)},
        )
    assert (Ticket.objects.get().title, effects()) == ("a", 0)


@pytest.mark.parametrize("at", ["first", "second", "middleware", "leased", "plain"])
def test_one_of_many_wins(ticket: Ticket, at: str) -> None:
    """Of thirty PUTs with one ETag, one wins; a retry of the winner gets its 200."""
    keys = [str(uuid4()) for _ in range(THREADS)]

    def put(key: str) -> Any:
        return send(at, ticket, title=key, If_Match=etag(ticket, 1), Idempotency_Key=key)

    responses = in_threads([lambda key=key: put(key) for key in keys])
    statuses = [response.status_code for response in responses]
    assert (statuses.count(200), statuses.count(412)) == (1, THREADS - 1)
    winner = keys[statuses.index(200)]
    found = Ticket.objects.get()
    assert (found.title, found.version, effects()) == (winner, 2, 1)
    assert_replays(responses[statuses.index(200)], put(winner))
    assert effects() == 1


class TestRefusals:
    def test_no_object(self) -> None:
        """A view that cannot find its object is refused, where conditions would be ignored."""
        assert send("byhand", 1, "post").status_code == 200
        assert send("byhand", 1, "patch").status_code == 200
        for method, headers in (("put", {}), ("patch", {"If_Match": '"1"'})):
            with pytest.raises(ImproperlyConfigured, match="no get_object"):
                Client().generic(
                    method.upper(),
                    "/byhand/1/",
                    headers={k.replace("_", "-"): v for k, v in headers.items()},
                )

    def test_handler_decorated(self, ticket: Ticket) -> None:
        """A handler that is protected inside the preconditions is refused."""
        with pytest.raises(ImproperlyConfigured, match="inside the preconditions"):
            Client().put(f"/handler/{ticket.pk}/", headers={"If-Match": '"1"'})

    def test_no_etag(self) -> None:
        """A view that requires what nobody could send is refused."""
        base = Base.objects.create()
        with pytest.raises(ImproperlyConfigured, match="Base has no version"):
            Client().put(f"/unversioned/{base.pk}/", headers={"If-Match": '"1"'})

    def test_order_of_decorators(self) -> None:
        """Above another decorator, or on a coroutine function, the decorator is refused."""

        async def asynchronous(request: HttpRequest) -> None:
            pass

        for view in (idempotent(change), never_cache(change), asynchronous):
            with pytest.raises(ImproperlyConfigured, match="is async or has another decorator"):
                preconditions(ticket_of)(view)
