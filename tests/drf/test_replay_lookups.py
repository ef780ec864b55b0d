"""How a replay looks up the object in the URL, where a view has a ``get_object()`` of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.http import Http404
from django.test import Client
from django.urls import path
from rest_framework import generics, mixins, permissions
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.drf import IdempotentViewMixin
from tests.http.test_replay_authorization import EffectSerializer, protect_by
from tests.models import Effect
from tests.support.shared import assert_replays, effects, is_replay, new_key
from tests.support.ways import decorated

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]


class Owned(permissions.BasePermission):
    """An object may be had unless it is somebody else's."""

    def has_object_permission(self, request: Request, view: Any, obj: Effect) -> bool:
        return not obj.reference.startswith("foreign")


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


class Unknown(Detail):
    """Needs what the URL does not name."""

    def get_object(self, owner: str, reference: str) -> Effect:  # type: ignore[override]
        found = Effect.objects.get(reference=f"{owner}{reference}")
        self.check_object_permissions(self.request, found)
        return found

    def put(self, request: Request, pk: int) -> Response:
        Effect.objects.create(reference="changed")
        self.get_object("my", " own")
        return Response({})


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    def logging(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return logging


class Opaque(Unknown):
    """Its signature does not say what it needs."""

    get_object = logged(Unknown.get_object)


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


WAYS = {
    "mixin": with_mixin(Detail),
    "decorator": decorated(Detail).as_view(),
    "middleware": Detail.as_view(),
    "unknown": with_mixin(Unknown),
}

urlpatterns = [
    *[path(f"{way}/<int:pk>/", view) for way, view in WAYS.items()],
    path("hidden/<int:pk>/", with_mixin(Hidden)),
    path("opaque/<int:pk>/", with_mixin(Opaque)),
]


@pytest.fixture
def thing() -> Effect:
    return Effect.objects.create(reference="mine")


def send(method: str, url: str, key: str) -> Any:
    client = Client()
    return getattr(client, method)(
        url,
        {"reference": "changed"},
        content_type="application/json",
        headers={"Idempotency-Key": f'"{key}"'},
    )


def give_away(thing: Effect) -> None:
    Effect.objects.filter(pk=thing.pk).update(reference="foreign")


def test_lookup_that_is_called_without_arguments(thing: Effect) -> None:
    """A get_object() that hands on what a framework's takes is called before a replay."""
    key, url = new_key(), f"/hidden/{thing.pk}/"
    first = send("put", url, key)
    assert first.status_code == 200
    assert_replays(first, send("put", url, key))
    give_away(thing)
    refused = send("put", url, key)
    assert (refused.status_code, is_replay(refused)) == (403, False)


@pytest.mark.parametrize("way", WAYS)
def test_lookup_with_arguments(way: str, settings: Any, thing: Effect) -> None:
    """Where get_object() takes arguments, its view says itself who has a replay."""
    protect_by(way, settings)
    Effect.objects.create(reference="my own")
    with pytest.raises(ImproperlyConfigured, match="check_idempotent_replay"):
        send("put", f"/{way}/{thing.pk}/", new_key())
    assert effects("changed") == 0


def test_lookup_that_hides_its_arguments(thing: Effect) -> None:
    """It is called as a framework would; what it lacks is its error, and no replay."""
    Effect.objects.create(reference="my own")
    key, url = new_key(), f"/opaque/{thing.pk}/"
    assert send("put", url, key).status_code == 200
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        send("put", url, key)
    assert effects("changed") == 1


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


class MixedPayments(
    mixins.ListModelMixin, mixins.CreateModelMixin, generics.GenericAPIView[Effect]
):
    """The same, of single mixins."""

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
    path("mixed-payments/<int:pk>/", with_mixin(MixedPayments)),
    path("refunding/<int:pk>/", with_mixin(Refunding)),
]


@pytest.mark.parametrize("url", ["/payments/{}/", "/mixed-payments/{}/"])
def test_parent_of_what_is_made(url: str, thing: Effect) -> None:
    """What a creating view's URL names is a parent, and no object of the view's own model."""
    give_away(thing)  # of the same number, and not the caller's
    User.objects.create(pk=thing.pk, username="parent")
    key = new_key()
    first = send("post", url.format(thing.pk), key)
    assert first.status_code == 201
    assert_replays(first, send("post", url.format(thing.pk), key))
    assert effects("changed") == 1


def test_own_lookup_of_what_makes_something(thing: Effect) -> None:
    """A creating view with a get_object() of its own says what its URL names."""
    key, url = new_key(), f"/refunding/{thing.pk}/"
    first = send("post", url, key)
    assert_replays(first, send("post", url, key))
    give_away(thing)
    assert send("post", url, key).status_code == 403
    assert effects("changed") == 1
