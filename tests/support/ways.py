"""Every way to protect a view, as a table: what the tests that must hold for all of them run over.

``WAYS`` are the ways that work. Each is served at ``/ways/<name>/`` by the ``urlpatterns`` here. A
POST of ``{"reference": …}`` makes one :class:`~tests.models.Effect` and returns 201 with the
reference and the caller's name. ``REFUSED`` are the views that cannot be protected. Each is refused
by name, when it is decorated or when the first request with a key comes.

The ways by middleware need ``MIDDLEWARE``. All others behave alike with and without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from itertools import count
from types import FunctionType
from typing import Any, ClassVar, Literal

from django.conf import settings
from django.contrib.auth.decorators import permission_required
from django.contrib.auth.mixins import PermissionRequiredMixin
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views.decorators.cache import cache_control, never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_POST
from django.views.decorators.vary import vary_on_headers
from django.views.generic import View
from ninja import NinjaAPI, Schema
from ninja.decorators import decorate_view
from ninja.errors import HttpError
from ninja.security import django_auth
from rest_framework import viewsets
from rest_framework.authentication import SessionAuthentication, TokenAuthentication
from rest_framework.authtoken.models import Token
from rest_framework.decorators import api_view, authentication_classes, permission_classes
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from tests.models import Effect

By = Literal["mixin", "decorator", "middleware"]

MIDDLEWARE = [
    *settings.MIDDLEWARE,
    "idempotency_django.middleware.IdempotencyMiddleware",
]
"""The setting that the ways by middleware need."""


PERMISSION = "tests.add_effect"
"""What a caller of a guarded way must be allowed; DRF's return 403, and so do Django's."""


@dataclass(frozen=True)
class Way:
    """One way to protect a view.

    Attributes:
        name: what it is; a part of its path.
        by: what protects it.
        view: what the URL leads to.
        guarded: a caller needs ``PERMISSION``; a session makes one known.
        tokens: callers may come with a DRF token, too.
        asynchronous: the view is async.
    """

    name: str
    by: By
    view: Any
    guarded: bool = False
    tokens: bool = False
    asynchronous: bool = False

    @property
    def path(self) -> str:
        """Where it is served."""
        return f"/ways/{self.name}/"


@dataclass(frozen=True)
class Refusal:
    """A view that cannot be protected, and the name that its refusal must say.

    Attributes:
        name: what it is.
        make: makes the view; where ``@idempotent`` is refused, that raises.
        says: what the refusal names: the function to decorate, or the framework.
        by: what would have protected it; a decorator refuses at once, the middleware a request.
    """

    name: str
    by: By
    make: Callable[[], Any]
    says: str


no_store = cache_control(no_store=True)  # its header says the same at any time
guard = permission_required(PERMISSION, raise_exception=True)


def harmless(view: Any) -> Any:
    """The view with decorators of Django that decide nothing about callers."""
    decorated = sensitive_post_parameters("number")(require_POST(never_cache(view)))
    return csrf_exempt(no_store(vary_on_headers("Accept")(decorated)))


def create(request: HttpRequest) -> HttpResponse:
    reference = json.loads(request.body)["reference"]
    Effect.objects.create(reference=reference)
    return JsonResponse({"reference": reference, "by": request.user.get_username()}, status=201)


async def acreate(request: HttpRequest) -> HttpResponse:
    reference = json.loads(request.body)["reference"]
    await Effect.objects.acreate(reference=reference)
    user = await request.auser()
    return JsonResponse({"reference": reference, "by": user.get_username()}, status=201)


def drf_create(request: Request) -> Response:
    Effect.objects.create(reference=request.data["reference"])
    by = request.user.get_username()
    return Response({"reference": request.data["reference"], "by": by}, status=201)


class Allowed(BasePermission):
    """DRF's way to ask for ``PERMISSION``."""

    def has_permission(self, request: Request, view: Any) -> bool:
        return bool(request.user.has_perm(PERMISSION))


class Base(APIView):
    """A DRF view that knows its callers."""

    authentication_classes: ClassVar[list[Any]] = [TokenAuthentication, SessionAuthentication]


def a_class(post: Any, *bases: type, **attributes: Any) -> Any:
    """A class-based view with this ``post()``."""
    return type("AView", bases or (View,), {"post": post, **attributes})


def post(self: Any, request: Any) -> Any:
    return create(request) if isinstance(request, HttpRequest) else drf_create(request)


async def apost(self: Any, request: Any) -> Any:
    return await acreate(request)


def handler() -> Any:
    """A new method, for decorators to be put on."""
    return copied(post)


def copied(function: Any) -> Any:
    """The same function again, which may be marked."""
    return FunctionType(function.__code__, function.__globals__, function.__name__)


def decorated(view_class: Any, *names: str, **fields: Any) -> Any:
    """The class with ``@idempotent`` on its handlers, or on those of these names."""
    unsafe = ("post", "put", "patch", "delete")
    own = {
        name: idempotent(**fields)(getattr(view_class, name))
        for name in names or unsafe
        if hasattr(view_class, name)
    }
    return type(view_class.__name__, (view_class,), {"__module__": view_class.__module__, **own})


def plain(request: HttpRequest) -> HttpResponse:
    return create(request)


async def aplain(request: HttpRequest) -> HttpResponse:
    return await acreate(request)


def drf_plain(request: Request) -> Response:
    return drf_create(request)


class Site:
    """Views that are methods of an object, as the admin site's are."""

    def plain(self, request: HttpRequest) -> HttpResponse:
        return create(request)


class DecoratesItself(View):
    """An ``as_view()`` that decorates what it makes."""

    def post(self, request: HttpRequest) -> HttpResponse:
        return create(request)

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Any:
        return guard(super().as_view(**initkwargs))


class ViewSet(viewsets.ViewSet):
    authentication_classes: ClassVar[list[Any]] = Base.authentication_classes
    permission_classes: ClassVar[list[Any]] = [Allowed]

    def create(self, request: Request) -> Response:
        return drf_create(request)


def mixed(*bases: type) -> tuple[type, ...]:
    """The bases of a view with the mixin."""
    return (IdempotentViewMixin, *bases)


def api(*decorators: Any, permissions: tuple[Any, ...] = ()) -> Any:
    """An ``@api_view`` function with decorators below it, the outermost first."""
    view: Any = drf_plain
    for decorator in reversed(decorators):
        view = decorator(view)
    view = permission_classes(permissions)(view)
    return api_view(["POST"])(authentication_classes(Base.authentication_classes)(view))


def guarded_method() -> Any:
    """A handler with a permission decorator on it."""
    return method_decorator(guard)(handler())


def guarded_mixin(*bases: type) -> tuple[type, ...]:
    """The bases of a view that Django's mixin guards."""
    return (PermissionRequiredMixin, *(bases or (View,)))


class Asked(Schema):
    reference: str


def ninja_create(request: HttpRequest, asked: Asked) -> Any:
    Effect.objects.create(reference=asked.reference)
    return {"reference": asked.reference, "by": _ninja_caller(request).get_username()}


async def aninja_create(request: HttpRequest, asked: Asked) -> Any:
    await Effect.objects.acreate(reference=asked.reference)
    await request.auser()
    return {"reference": asked.reference, "by": _ninja_caller(request).get_username()}


def _ninja_caller(request: Any) -> Any:
    return getattr(request, "auth", None) or request.user


def by_token(request: HttpRequest) -> Any:
    """django-ninja's way to know callers by DRF's tokens, and to ask for ``PERMISSION``."""
    key = request.headers.get("Authorization", "").removeprefix("Token ")
    token = Token.objects.select_related("user").filter(key=key).first()
    user = token.user if token else request.user
    if user.is_authenticated and not user.has_perm(PERMISSION):
        raise HttpError(403, "Not allowed")
    return user if user.is_authenticated else None


def operation(function: Any, **options: Any) -> Any:
    """The view that django-ninja makes of an operation."""
    api: Any = NinjaAPI(urls_namespace=f"ways-{next(_numbers)}", openapi_url=None)
    api.post("/", response={201: dict[str, str]}, **options)(function)
    [route] = [route for route in api.urls[0] if route.name != "api-root"]
    return route.callback


_numbers = count()

GUARDED = {"permission_required": PERMISSION, "raise_exception": True}

WAYS: list[Way] = [
    # @idempotent on functions.
    Way("function", "decorator", idempotent(plain)),
    Way("function-guard-above", "decorator", guard(idempotent(plain)), guarded=True),
    Way("async-function", "decorator", idempotent(aplain), asynchronous=True),
    Way(
        "async-function-guard-above",
        "decorator",
        guard(idempotent(aplain)),
        guarded=True,
        asynchronous=True,
    ),
    # @idempotent on the methods of class-based views.
    Way("handler", "decorator", a_class(idempotent(handler())).as_view()),
    Way(
        "handler-guard-above",
        "decorator",
        a_class(method_decorator(guard)(idempotent(handler()))).as_view(),
        guarded=True,
    ),
    Way(
        "async-handler",
        "decorator",
        a_class(idempotent(copied(apost))).as_view(),
        asynchronous=True,
    ),
    # @idempotent on DRF views.
    Way(
        "drf-handler-guard-above",
        "decorator",
        a_class(method_decorator(guard)(idempotent(handler())), Base).as_view(),
        guarded=True,
        tokens=True,
    ),
    Way("api-view-below", "decorator", api(idempotent), tokens=True),
    Way("api-view-below-guard-above", "decorator", api(guard, idempotent), True, True),
    # @idempotent on operations of django-ninja.
    Way("ninja", "decorator", operation(idempotent(ninja_create))),
    Way(
        "ninja-session",
        "decorator",
        operation(decorate_view(guard)(idempotent(ninja_create)), auth=django_auth),
        guarded=True,
    ),
    Way("ninja-token", "decorator", operation(idempotent(ninja_create), auth=by_token), True, True),
    Way("async-ninja", "decorator", operation(idempotent(aninja_create)), asynchronous=True),
    # The mixin.
    Way("mixin", "mixin", a_class(handler(), *mixed(Base)).as_view(), tokens=True),
    Way(
        "mixin-permission",
        "mixin",
        a_class(handler(), *mixed(Base), permission_classes=[Allowed]).as_view(),
        guarded=True,
        tokens=True,
    ),
    Way(
        "mixin-viewset",
        "mixin",
        type("V", mixed(ViewSet), {}).as_view({"post": "create"}),  # type: ignore[attr-defined]
        guarded=True,
        tokens=True,
    ),
    Way(
        "mixin-and-decorator",
        "mixin",
        a_class(method_decorator(guard)(idempotent(handler())), *mixed(Base)).as_view(),
        guarded=True,
        tokens=True,
    ),
    # The middleware, in front of views that know nothing of it.
    Way("middleware-function", "middleware", plain),
    Way("middleware-async-function", "middleware", aplain, asynchronous=True),
    Way("middleware-class", "middleware", a_class(handler()).as_view()),
    Way("middleware-async-class", "middleware", a_class(apost).as_view(), asynchronous=True),
    Way("middleware-as-view-guard", "middleware", guard(a_class(handler()).as_view()), True),
    Way("middleware-as-view-decorates-itself", "middleware", DecoratesItself.as_view(), True),
    Way(
        "middleware-guard-mixin",
        "middleware",
        a_class(handler(), *guarded_mixin(), **GUARDED).as_view(),
        guarded=True,
    ),
    Way(
        "middleware-drf",
        "middleware",
        a_class(handler(), Base, permission_classes=[Allowed]).as_view(),
        guarded=True,
        tokens=True,
    ),
    Way("middleware-api-view", "middleware", api(), tokens=True),
    Way("middleware-api-view-permission", "middleware", api(permissions=(Allowed,)), True, True),
    Way("middleware-viewset", "middleware", ViewSet.as_view({"post": "create"}), True, True),
]


# What cannot be protected.


def unknown(view: Any) -> Any:
    """A decorator that nobody knows, though it is written as most are."""

    @wraps(view)
    def inner(request: Any) -> Any:
        return view(request)

    return inner


def of_anything(view: Any) -> Any:
    """… that takes anything, and hides the view."""

    def hides(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    return hides


def by_an_object(view: Any) -> Any:
    """… that leaves the call to an object."""
    guard = Guard(view)

    def inner(*args: Any) -> Any:
        return guard.run(*args)

    return inner


class Guard:
    def __init__(self, view: Any) -> None:
        self.view = view

    def run(self, *args: Any) -> Any:
        return self.view(*args)


class OwnDispatch(View):
    """A class that has no handlers: it does everything in ``dispatch()``, as GraphQL's views do."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return create(request)


ABOVE: dict[str, tuple[str, Callable[[], Any]]] = {
    "partial": ("functools.partial", lambda: partial(plain)),
    "bound-method": ("Site.plain", lambda: Site().plain),
    "guard": ("directly above the function tests.support.ways.plain", lambda: guard(plain)),
    "atomic-guard": ("user_passes_test()", lambda: transaction.atomic(guard(plain))),
}
"""Views that ``@idempotent`` must not be above, and what the refusal says. Decorators that nobody
knows are in ``test_rule.py``.
"""

REFUSED: list[Refusal] = [
    *(
        Refusal(f"{by}-{name}", by, made, says)
        for name, (says, make) in ABOVE.items()
        for by, made in (
            ("decorator", lambda make=make: idempotent(make())),
            ("middleware", make),
        )
    ),
    Refusal("decorator-class", "decorator", lambda: idempotent(a_class(handler())), "AView"),
    Refusal(
        "decorator-as-view", "decorator", lambda: idempotent(a_class(handler()).as_view()), "AView"
    ),
    Refusal("decorator-above-api-view", "decorator", lambda: idempotent(api()), "@api_view"),
    Refusal("decorator-own-dispatch", "decorator", lambda: idempotent(OwnDispatch), "OwnDispatch"),
    Refusal("decorator-dispatch", "decorator", lambda: idempotent(OwnDispatch.dispatch), "post()"),
    Refusal(
        "method-decorator",
        "decorator",
        lambda: method_decorator(idempotent)(handler()),
        "without method_decorator()",
    ),
    Refusal(
        "method-decorator-on-dispatch",
        "decorator",
        lambda: method_decorator(idempotent, name="dispatch")(a_class(handler())),
        "without method_decorator()",
    ),
    Refusal(
        "decorator-handler-unknown", "decorator", lambda: idempotent(_unknown_method()), "post"
    ),
    Refusal("decorator-handler-guard", "decorator", lambda: idempotent(guarded_method()), "post"),
    *(
        Refusal(f"{by}-{kind}-handler-{name}", by, made, "")
        for name, method in {
            "unknown": lambda: _unknown_method(),  # noqa: PLW0108  # it is defined below
            "guard": guarded_method,
            "object": lambda: by_an_object(handler()),
            "hiding": lambda: of_anything(handler()),
        }.items()
        for by, kind, made in (
            ("middleware", "django", lambda method=method: a_class(method()).as_view()),
            ("middleware", "drf", lambda method=method: a_class(method(), Base).as_view()),
            ("mixin", "drf", lambda method=method: a_class(method(), *mixed(Base)).as_view()),
        )
    ),
    Refusal("middleware-own-dispatch", "middleware", OwnDispatch.as_view, "OwnDispatch"),
    Refusal("middleware-api-view-unknown", "middleware", lambda: api(unknown), "drf_plain"),
    Refusal("middleware-api-view-guard", "middleware", lambda: api(guard), "drf_plain"),
    Refusal(
        "middleware-hidden-class",
        "middleware",
        lambda: of_anything(a_class(handler()).as_view()),
        "hides",
    ),
    Refusal(
        "middleware-static",
        "middleware",
        lambda: a_class(staticmethod(plain)).as_view(),
        "staticmethod",
    ),
]


def _unknown_method() -> Any:
    post = handler()

    @wraps(post)
    def inner(self: Any, request: Any) -> Any:
        return post(self, request)

    return inner


urlpatterns = [path(way.path.removeprefix("/"), way.view, name=way.name) for way in WAYS]
