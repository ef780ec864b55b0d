"""Who may have a replay: nobody who would be refused under a new key, also for its object."""

from __future__ import annotations

import base64
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path
from django.views.generic import View
from django.views.generic.detail import SingleObjectMixin
from rest_framework import exceptions, generics, permissions, viewsets
from rest_framework.authentication import BasicAuthentication
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy
from idempotency_django.stores.records import Record
from tests.models import Effect
from tests.support.shared import (
    EffectSerializer,
    assert_replays,
    effects,
    is_replay,
    new_key,
    post,
    record,
)
from tests.support.ways import MIDDLEWARE, decorated

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]

LEASED = Policy(mode="leased")


class Owner(permissions.BasePermission):
    """An object belongs to the user whose name it begins with."""

    def has_object_permission(self, request: Request, view: Any, obj: Effect) -> bool:
        return obj.reference.startswith(request.user.get_username())


def owned_by(request: Any) -> QuerySet[Effect]:
    return Effect.objects.filter(reference__startswith=request.user.get_username())


class Permitted(viewsets.ModelViewSet[Effect]):
    """Whose objects they are, a permission says."""

    authentication_classes = [BasicAuthentication]
    permission_classes: ClassVar[Any] = [permissions.IsAuthenticated & Owner]
    queryset = Effect.objects.all()
    serializer_class = EffectSerializer

    @action(detail=True, methods=["post"])
    def pay(self, request: Request, **kwargs: Any) -> Response:
        paid = self.get_object()
        Effect.objects.create(reference="paid")
        return Response({"secret": f"of {paid.pk}"})


class Filtered(Permitted):
    """Whose objects they are, the queryset says."""

    permission_classes = [permissions.IsAuthenticated]

    def get_queryset(self) -> QuerySet[Effect]:
        return owned_by(self.request)


class BySlug(IdempotentViewMixin, Permitted):
    """Its URL names an object by something else than its primary key."""

    lookup_field = "reference"
    lookup_url_kwarg = "name"

    def get_object(self) -> Effect:
        try:
            return owned_by(self.request).get(reference__endswith=self.kwargs["name"])
        except Effect.DoesNotExist:
            raise exceptions.NotFound from None


ACTIONS = {"post": "pay", "delete": "destroy"}


def ways(base: type[Any]) -> dict[str, Any]:
    """The view, protected in each way."""
    mixin = type(base.__name__, (IdempotentViewMixin, base), {})
    leased = type(base.__name__, (mixin,), {"idempotency_policy": LEASED})
    return {
        "mixin": mixin.as_view(ACTIONS),
        "leased": leased.as_view(ACTIONS),
        "handler": decorated(base, "pay", "destroy").as_view(ACTIONS),
        "middleware": base.as_view(ACTIONS),
    }


class Django(SingleObjectMixin, View):
    """A class-based view of Django's, that pays."""

    def get_queryset(self) -> QuerySet[Effect]:
        return owned_by(self.request)

    def post(self, request: HttpRequest, **kwargs: Any) -> HttpResponse:
        paid = self.get_object()
        Effect.objects.create(reference="paid")
        return JsonResponse({"secret": f"of {paid.pk}"})


class Mine(Django):
    """Its URL names an object by no primary key, though it says so."""

    def get_object(self, queryset: Any = None) -> Effect:
        found = self.get_queryset().first()
        if found is None:
            raise Http404
        return found


class Slug(Django):
    """Its URL names an object by something else than its primary key."""

    slug_field = "reference"

    def delete(self, request: HttpRequest, **kwargs: Any) -> HttpResponse:
        self.get_object().delete()
        return HttpResponse(status=204)


class Async(Django):
    async def post(self, request: HttpRequest, **kwargs: Any) -> HttpResponse:  # type: ignore[override]
        paid = await owned_by(request).aget(pk=kwargs["pk"])
        await Effect.objects.acreate(reference="paid")
        return JsonResponse({"secret": f"of {paid.pk}"})


DJANGO = {
    "class": decorated(Django).as_view(),
    "async": decorated(Async).as_view(),
    "middleware": Django.as_view(),
}


class Nested(IdempotentViewMixin, APIView):
    """Checks the permission on an object that it looks up itself."""

    authentication_classes = [BasicAuthentication]
    permission_classes: ClassVar[Any] = [permissions.IsAuthenticated & Owner]

    def post(self, request: Request, pk: int) -> Response:
        self.check_object_permissions(request, Effect.objects.get(pk=pk))
        Effect.objects.create(reference="paid")
        return Response({"secret": f"of {pk}"})


class NestedOpen(Nested):
    """Checks it in vain: its permissions have no say on objects."""

    permission_classes = [permissions.IsAuthenticated]


class Locking(IdempotentViewMixin, generics.GenericAPIView[Effect]):
    """Locks the object that it works on."""

    authentication_classes = [BasicAuthentication]
    permission_classes = [Owner]
    queryset = Effect.objects.select_for_update()
    idempotency_policy = LEASED

    def post(self, request: Request, pk: int) -> Response:
        with transaction.atomic():
            self.get_object()
            Effect.objects.create(reference="paid")
        return Response({"secret": f"of {pk}"})


class NestedHooked(Nested):
    """Says itself who may have a replay."""

    def check_idempotent_replay(self, request: Request, record: Record) -> None:
        self.check_object_permissions(request, Effect.objects.get(pk=self.kwargs["pk"]))


class Lax(NestedOpen):
    """Means to refuse, and only says so."""

    def check_idempotent_replay(self, request: Request, record: Record) -> Any:
        return record.payload is not None


urlpatterns = [
    *[
        path(f"{base.__name__}/{way}/<int:pk>/", view)
        for base in (Permitted, Filtered)
        for way, view in ways(base).items()
    ],
    *[path(f"Django/{way}/<int:pk>/", view) for way, view in DJANGO.items()],
    path("slug/<str:name>/", BySlug.as_view(ACTIONS)),
    path("Slug/<str:slug>/", decorated(Slug).as_view()),
    path("mine/<str:pk>/", decorated(Mine).as_view()),
    path("nested/<int:pk>/", Nested.as_view()),
    path("nested-open/<int:pk>/", NestedOpen.as_view()),
    path("locking/<int:pk>/", Locking.as_view()),
    path("hooked/<int:pk>/", NestedHooked.as_view()),
    path("lax/<int:pk>/", Lax.as_view()),
]


class Caller:
    """Alice, who calls with Basic credentials and with a session."""

    def __init__(self, name: str = "alice") -> None:
        self.user = User.objects.create_user(name, password=name)
        self.client = Client()
        self.client.force_login(self.user)
        self.basic = "Basic " + base64.b64encode(f"{name}:{name}".encode()).decode()

    def send(self, path: str, key: str, method: str = "post") -> Any:
        return post(self.client, path, key, method=method, headers={"Authorization": self.basic})


@pytest.fixture
def alice() -> Caller:
    return Caller()


@pytest.fixture
def thing() -> Effect:
    return Effect.objects.create(reference="alice's")


def protect_by(way: str, settings: Any) -> None:
    if way == "middleware":
        settings.MIDDLEWARE = MIDDLEWARE


def give_away(thing: Effect) -> None:
    Effect.objects.filter(pk=thing.pk).update(reference="bob's")


@pytest.mark.django_db(transaction=True)  # replays are counted when they are committed
@pytest.mark.parametrize("way", ["mixin", "leased", "handler", "middleware"])
@pytest.mark.parametrize(("base", "refusal"), [("Permitted", 403), ("Filtered", 404)])
def test_object_withdrawn(
    base: str, refusal: int, way: str, settings: Any, alice: Caller, thing: Effect, sent: list[str]
) -> None:
    """Who has lost the right to an object gets no replay of what was done with it."""
    protect_by(way, settings)
    key, url = new_key(), f"/{base}/{way}/{thing.pk}/"
    first = alice.send(url, key)
    assert first.status_code == 200
    assert_replays(first, alice.send(url, key))
    stored = record(key)
    give_away(thing)
    refused, new = alice.send(url, key), alice.send(url, new_key())
    assert refused.status_code == new.status_code == refusal
    assert refused.content == new.content
    assert not is_replay(refused)
    assert effects("paid") == 1
    assert sent.count("replayed") == 1
    again = record(key)
    assert (again.status, again.response_body) == (stored.status, stored.response_body)
    if way != "leased":  # whose replay is found and counted in one statement
        assert again.replay_count == stored.replay_count == 1
    thing.save()
    assert_replays(first, alice.send(url, key))


@pytest.mark.parametrize("way", sorted(DJANGO))
def test_object_withdrawn_from_django_view(
    way: str, settings: Any, alice: Caller, thing: Effect, sent: list[str]
) -> None:
    """The same holds for get_object() of Django's generic views."""
    protect_by(way, settings)
    key, url = new_key(), f"/Django/{way}/{thing.pk}/"
    first = alice.send(url, key)
    assert first.status_code == 200
    assert_replays(first, alice.send(url, key))
    give_away(thing)
    refused = alice.send(url, key)
    assert refused.status_code == 404
    assert b"secret" not in refused.content
    assert effects("paid") == 1
    assert sent.count("replayed") == 1


@pytest.mark.parametrize("way", ["mixin", "leased", "handler", "middleware"])
@pytest.mark.parametrize("base", ["Permitted", "Filtered"])
def test_object_gone(base: str, way: str, settings: Any, alice: Caller, thing: Effect) -> None:
    """A DELETE that is sent again is replayed: what is gone is no reason to refuse."""
    protect_by(way, settings)
    key, url = new_key(), f"/{base}/{way}/{thing.pk}/"
    first = alice.send(url, key, "delete")
    assert first.status_code == 204
    assert_replays(first, alice.send(url, key, "delete"))


def test_lookup_by_what_names_no_object(alice: Caller, thing: Effect) -> None:
    """It is unknown whether it is gone, so its 404 is that of the retry."""
    key = new_key()
    assert alice.send("/mine/me/", key).status_code == 200
    Effect.objects.all().delete()
    refused = alice.send("/mine/me/", key)
    assert (refused.status_code, is_replay(refused)) == (404, False)


@pytest.mark.parametrize("url", ["/slug/{}/", "/Slug/{}/"])
class TestNames:
    """A URL that names an object by something that may change."""

    @pytest.fixture
    def named(self, thing: Effect) -> Effect:
        Effect.objects.filter(pk=thing.pk).update(reference="alice-1")
        return thing

    @pytest.mark.parametrize("taken", [False, True])
    def test_renamed(self, url: str, named: Effect, alice: Caller, taken: bool) -> None:
        """An object that was renamed and given away is not gone: the retry gets what is new."""
        at, key = url.format("alice-1"), new_key()
        first = alice.send(at, key)
        assert first.status_code == 200
        assert_replays(first, alice.send(at, key))
        Effect.objects.filter(pk=named.pk).update(reference="bob-1")
        if taken:
            Effect.objects.create(reference="carol-1")
        for sent in (key, new_key()):
            refused = alice.send(at, sent)
            assert (refused.status_code, is_replay(refused)) == (404, False)
        assert effects("paid") == 1

    def test_deleted(self, url: str, named: Effect, alice: Caller) -> None:
        """What the request itself has deleted is no reason to refuse its retry."""
        key = new_key()
        first = alice.send(url.format("alice-1"), key, "delete")
        assert first.status_code == 204
        assert_replays(first, alice.send(url.format("alice-1"), key, "delete"))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("way", ["mixin", "leased"])
def test_recalled(way: str, settings: Any, alice: Caller, thing: Effect, sent: list[str]) -> None:
    """A response that a cache remembers is refused likewise."""
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    settings.IDEMPOTENCY = {
        "STORES": {"default": {"BACKEND": "idempotency_django.contrib.cached.CachedStore"}}
    }
    key, url = new_key(), f"/Permitted/{way}/{thing.pk}/"
    first = alice.send(url, key)
    assert_replays(first, alice.send(url, key))
    give_away(thing)
    assert alice.send(url, key).status_code == 403
    assert sent.count("replayed") == 1


@pytest.mark.django_db(transaction=True)
def test_object_that_is_locked(alice: Caller, thing: Effect) -> None:
    """An object that the view locks is locked in a transaction of its own before a replay."""
    key, url = new_key(), f"/locking/{thing.pk}/"
    first = alice.send(url, key)
    assert_replays(first, alice.send(url, key))
    give_away(thing)
    assert alice.send(url, key).status_code == 403


def test_object_that_no_replay_can_check(alice: Caller, thing: Effect) -> None:
    """A view that checks an object by itself is refused, before it has any effect."""
    url, headers = f"/nested/{thing.pk}/", {"Authorization": alice.basic}
    with pytest.raises(ImproperlyConfigured, match="check_idempotent_replay"):
        alice.send(url, new_key())
    assert effects("paid") == 0
    assert alice.client.post(url, headers=headers).status_code == 200  # without a key
    assert effects("paid") == 1


def test_permissions_without_objects(alice: Caller, thing: Effect) -> None:
    """Where no permission has a say on objects, none has been withdrawn."""
    key = new_key()
    first = alice.send(f"/nested-open/{thing.pk}/", key)
    assert_replays(first, alice.send(f"/nested-open/{thing.pk}/", key))


def test_hook_checks_object(alice: Caller, thing: Effect) -> None:
    """With the hook such a view is served, and its replays are refused."""
    key = new_key()
    first = alice.send(f"/hooked/{thing.pk}/", key)
    assert_replays(first, alice.send(f"/hooked/{thing.pk}/", key))
    give_away(thing)
    refused = alice.send(f"/hooked/{thing.pk}/", key)
    assert refused.status_code == 403
    assert b"secret" not in refused.content
    assert effects("paid") == 1


def test_hook_that_returns(alice: Caller, thing: Effect) -> None:
    """A hook that returns something instead of raising lets nobody pass by mistake."""
    key, url = new_key(), f"/lax/{thing.pk}/"
    alice.send(url, key)
    with pytest.raises(TypeError, match=r"check_idempotent_replay\(\) of Lax returned True"):
        alice.send(url, key)


# How a replay looks up the object, where a view has a get_object() of its own.


class Owned(permissions.BasePermission):
    """An object may be had unless it is somebody else's."""

    def has_object_permission(self, request: Request, view: Any, obj: Effect) -> bool:
        return not obj.reference.startswith("bob")


class Detail(APIView):
    """As REST framework's tutorial writes it: ``get_object()`` gets what the URL has."""

    authentication_classes: ClassVar[list[Any]] = []
    permission_classes = [Owned]

    def get_object(self, pk: int) -> Effect:
        try:
            found = Effect.objects.get(pk=pk)
        except Effect.DoesNotExist:
            raise Http404 from None
        self.check_object_permissions(self.request, found)
        return found

    def put(self, request: Request, pk: int) -> Response:
        found = self.get_object(pk)
        Effect.objects.create(reference="changed")
        return Response({"secret": f"of {found.pk}"})


class Hidden(generics.UpdateAPIView[Effect]):
    """Overrides what the framework calls without arguments."""

    authentication_classes: ClassVar[list[Any]] = []
    permission_classes = [Owned]
    queryset = Effect.objects.all()
    serializer_class = EffectSerializer

    def get_object(self, *args: Any, **kwargs: Any) -> Any:
        return super().get_object(*args, **kwargs)


def with_mixin(view: type[Any]) -> Any:
    return type(view.__name__, (IdempotentViewMixin, view), {}).as_view()


urlpatterns += [
    path("detail/<int:pk>/", with_mixin(Detail)),
    path("hidden/<int:pk>/", with_mixin(Hidden)),
]


def send(method: str, url: str, key: str) -> Any:
    return post(Client(), url, key, "changed", method=method)


def test_lookup_that_is_called_without_arguments(thing: Effect) -> None:
    """A get_object() that hands on what a framework's takes is called before a replay."""
    key, url = new_key(), f"/hidden/{thing.pk}/"
    first = send("put", url, key)
    assert first.status_code == 200
    assert_replays(first, send("put", url, key))
    give_away(thing)
    refused = send("put", url, key)
    assert (refused.status_code, is_replay(refused)) == (403, False)


def test_lookup_with_arguments(thing: Effect) -> None:
    """Where get_object() takes arguments, its view says itself who has a replay."""
    with pytest.raises(ImproperlyConfigured, match="check_idempotent_replay"):
        send("put", f"/detail/{thing.pk}/", new_key())
    assert effects("changed") == 0


class Team(generics.UpdateAPIView[Effect]):
    """Whose queryset is for members only."""

    authentication_classes: ClassVar[list[Any]] = []
    permission_classes: ClassVar[list[Any]] = []
    serializer_class = EffectSerializer
    members: ClassVar[Any] = None

    def get_queryset(self) -> Any:
        if self.members is not None:
            raise self.members
        return Effect.objects.all()


urlpatterns += [path("team/<int:pk>/", with_mixin(Team))]


@pytest.mark.parametrize(
    ("error", "status"),
    [(Http404(), 404), (AttributeError("team"), None), (AssertionError(), None)],
)
def test_queryset_that_refuses(
    thing: Effect, monkeypatch: Any, error: Exception, status: int | None
) -> None:
    """A queryset that refuses the caller refuses a replay, whatever it raises."""
    key, url = new_key(), f"/team/{thing.pk}/"
    first = send("put", url, key)
    assert_replays(first, send("put", url, key))
    monkeypatch.setattr(Team, "members", error)
    if status is None:
        with pytest.raises(type(error)):
            send("put", url, key)
    else:
        refused = send("put", url, key)
        assert (refused.status_code, is_replay(refused)) == (status, False)


class Payments(generics.CreateAPIView[Effect]):
    """Makes something below the object that its URL names, in a handler of its own."""

    authentication_classes: ClassVar[list[Any]] = []
    permission_classes = [Owned]
    queryset = Effect.objects.all()
    serializer_class = EffectSerializer

    def post(self, request: Request, pk: int) -> Response:
        return self.create(request)


class Refunding(Payments):
    """Finds by itself what it works on."""

    def get_object(self) -> Effect:
        found = Effect.objects.get(pk=self.kwargs["pk"])
        self.check_object_permissions(self.request, found)
        return found

    def post(self, request: Request, pk: int) -> Response:
        self.get_object()
        return self.create(request)


urlpatterns += [
    path("payments/<int:pk>/", with_mixin(Payments)),
    path("refunding/<int:pk>/", with_mixin(Refunding)),
]


def test_parent_of_what_is_made(thing: Effect) -> None:
    """What a creating view's URL names is a parent, and no object of the view's own model."""
    give_away(thing)  # of the same number, and not the caller's
    User.objects.create(pk=thing.pk, username="parent")
    url, key = f"/payments/{thing.pk}/", new_key()
    first = send("post", url, key)
    assert first.status_code == 201
    assert_replays(first, send("post", url, key))
    assert effects("changed") == 1


def test_own_lookup_of_what_makes_something(thing: Effect) -> None:
    """A creating view with a get_object() of its own says what its URL names."""
    key, url = new_key(), f"/refunding/{thing.pk}/"
    first = send("post", url, key)
    assert_replays(first, send("post", url, key))
    give_away(thing)
    assert send("post", url, key).status_code == 403
    assert effects("changed") == 1
