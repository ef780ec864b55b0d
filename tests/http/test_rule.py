"""The rule for decorators, attacked: a caller who has lost the right never gets a replay.

Each decorator here refuses a request without ``X-Allowed: yes``, as a login, a permission, a second
factor, a rate limit or a list of addresses would. It is put around a view, a handler or
``dispatch()`` in every place. Then either the view is protected, and the decorator is asked before
each replay; or it is refused, and nothing runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ContextDecorator, contextmanager
from typing import Any, ClassVar
from uuid import uuid4

import pytest
import wrapt
from asgiref.sync import async_to_sync, iscoroutinefunction, markcoroutinefunction
from csp.decorators import csp_exempt
from django.contrib.auth.decorators import permission_required
from django.contrib.auth.mixins import UserPassesTestMixin
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.core.handlers.base import BaseHandler
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.utils.decorators import method_decorator
from django.views.decorators.cache import cache_page, never_cache
from django.views.decorators.clickjacking import xframe_options_deny
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.debug import sensitive_post_parameters, sensitive_variables
from django.views.decorators.http import condition, require_POST
from django.views.decorators.vary import vary_on_cookie
from django.views.generic import FormView, View
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import generics, mixins, viewsets
from rest_framework.decorators import api_view
from rest_framework.request import Request
from rest_framework.views import APIView

from idempotency_django.checks.inventory import endpoints
from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.http.rule import objection_to, objection_to_handler
from idempotency_django.middleware import IdempotencyMiddleware
from tests.models import Effect
from tests.support.shared import effects, is_replay, new_key
from tests.support.ways import MIDDLEWARE, copied

Decorator = Callable[[Any], Any]


# What does the work.


def work(request: Any) -> HttpResponse:
    Effect.objects.create(reference=request.headers["X-Reference"])
    return JsonResponse({"secret": "of the caller"}, status=201)


def function(request: Any) -> HttpResponse:
    return work(request)


async def coroutine(request: Any) -> HttpResponse:
    await Effect.objects.acreate(reference=request.headers["X-Reference"])
    return JsonResponse({"secret": "of the caller"}, status=201)


def handler(self: Any, request: Any) -> HttpResponse:
    return work(request)


async def ahandler(self: Any, request: Any) -> HttpResponse:
    return await coroutine(request)


# What checks the caller.


def ask(args: Any) -> None:
    request = next(each for each in args if isinstance(each, HttpRequest | Request))
    if request.headers.get("X-Allowed") != "yes":
        raise PermissionDenied


def like(view: Any, inner: Any) -> Any:
    return markcoroutinefunction(inner) if iscoroutinefunction(view) else inner


def hiding(view: Any) -> Any:
    def inner(*args: Any, **kwargs: Any) -> Any:
        ask(args)
        return view(*args, **kwargs)

    return like(view, inner)


def wrapping(view: Any) -> Any:
    return functools.wraps(view)(hiding(view))


def by_a_default(view: Any) -> Any:
    def inner(*args: Any, _view: Any = view) -> Any:
        ask(args)
        return _view(*args)

    return like(view, inner)


def by_a_positional_default(view: Any) -> Any:
    def inner(request: Any, _view: Any = view) -> Any:
        ask([request])
        return _view(request)

    return like(view, inner)


class Called:
    """An object in the place of a view."""

    def __init__(self, view: Any) -> None:
        self.view = view
        like(view, self)

    def __call__(self, *args: Any) -> Any:
        ask(args)
        return self.view(*args)


VIEWS: dict[str, Any] = {}


def by_a_name(view: Any) -> Any:
    """It says what it wraps, and holds a name only."""
    name = uuid4().hex
    VIEWS[name] = view

    @functools.wraps(view)
    def inner(*args: Any) -> Any:
        ask(args)
        return VIEWS[name](*args)

    return like(view, inner)


@wrapt.decorator  # type: ignore[untyped-decorator]
def by_wrapt(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    ask(args)
    return wrapped(*args, **kwargs)


def renamed(view: Any) -> Any:
    """``wraps()`` around a decorator of Django's skips the check between them."""
    return functools.wraps(view)(never_cache(like(view, hiding(view))))


def renamed_atomic(view: Any) -> Any:
    return functools.wraps(view)(transaction.atomic(like(view, hiding(view))))


allowed: list[str] = []
"""What the request says that runs now, for a check without its arguments."""


def ask_of_now() -> None:
    if allowed != ["yes"]:
        raise PermissionDenied


class Checking(ContextDecorator):
    """A context manager that nothing is known of, as a decorator."""

    def __enter__(self) -> None:
        ask_of_now()

    def __exit__(self, *_: Any) -> None: ...


@contextmanager
def managed() -> Any:
    ask_of_now()
    yield


class AtomicLike(transaction.Atomic):
    """A subclass of Django's ``Atomic`` that does more."""

    def __enter__(self) -> None:
        ask_of_now()
        super().__enter__()


def by_a_subclass_of_atomic(view: Any) -> Any:
    return AtomicLike(None, savepoint=True, durable=False)(view)


def tracer(name: str, module: str) -> Decorator:
    """A proxy of a tracer, which is made of its own wrapper, around what is checked."""
    names: dict[str, Any] = {"__name__": module}
    exec(
        "def trace(wrapped, instance, args, kwargs): return wrapped(*args, **kwargs)",
        names,
    )
    return lambda view: wrapt.FunctionWrapper(view, names["trace"])


NEW_RELIC = "newrelic.hooks.framework_django"

CHECKS: dict[str, Decorator] = {
    "wraps": wrapping,
    "no-wraps": hiding,
    "default": by_a_default,
    "positional-default": by_a_positional_default,
    "name": by_a_name,
    "wrapt": by_wrapt,
    "renamed": renamed,
    "renamed-atomic": renamed_atomic,
    "context-decorator": Checking(),
    "context-manager": managed(),
    "subclass-of-atomic": by_a_subclass_of_atomic,
    "called": Called,
    "hidden-below-never-cache": lambda view: never_cache(hiding(view)),
    "above-never-cache": lambda view: wrapping(never_cache(view)),
    "below-atomic": lambda view: transaction.atomic(hiding(view)),
    "below-a-tracer": lambda view: tracer("trace", "ddtrace.contrib.trace")(hiding(view)),
    "wraps-below-a-tracer": lambda view: tracer("wrap_view", "newrelic.hooks.framework_django")(
        wrapping(view)
    ),
    "by-a-false-tracer": lambda view: tracer("trace", "ddtracer.contrib.trace")(hiding(view)),
    "lru-cache": lambda view: functools.lru_cache(hiding(view)),
}
"""Decorators that check the caller, by how they hold the view."""

OBJECTS = {"called", "lru-cache"}
"""Those that make no function, so they are no methods."""

REQUEST_FIRST = {"positional-default", "hidden-below-never-cache", "renamed"}
"""Those that need the request first, as on a function."""

SYNC = {"below-atomic", "renamed-atomic", "subclass-of-atomic", "context-decorator", "lru-cache"}
SYNC |= {"context-manager", "below-a-tracer", "wraps-below-a-tracer", "by-a-false-tracer", "wrapt"}
"""Those behind which Django, or the decorator itself, does not see that a view is async."""


def by_a_dict(view: Any) -> Any:
    """It keeps the view where only the middleware suspects it."""
    views = {"POST": hiding(view)}
    return like(view, lambda *args: views["POST"](*args))  # noqa: PLW0108


# Where.


def a_class(post: Any, *bases: type, **attributes: Any) -> Any:
    own = {"authentication_classes": (), "permission_classes": (), **attributes}
    return type("AView", bases or (View,), {"post": post, **own})


def an_api_view(view: Any) -> Any:
    made = api_view(["POST"])(view)
    made.cls.authentication_classes = made.cls.permission_classes = ()
    return made


MIXED = (IdempotentViewMixin, APIView)

FUNCTIONS: dict[str, Callable[[Decorator], Any]] = {
    "below @idempotent": lambda check: idempotent(check(copied(function))),
    "below @idempotent and more": lambda check: idempotent(
        csrf_exempt(vary_on_cookie(check(copied(function))))
    ),
    "middleware": lambda check: check(copied(function)),
    "middleware, below more": lambda check: transaction.atomic(
        csrf_exempt(check(copied(function)))
    ),
    "middleware, around as_view()": lambda check: check(a_class(handler).as_view()),
    "middleware, around as_view() of DRF": lambda check: check(a_class(handler, APIView).as_view()),
    "middleware, around @api_view": lambda check: check(an_api_view(copied(function))),
    "middleware, below @api_view": lambda check: an_api_view(check(copied(function))),
    "below @api_view and @idempotent": lambda check: an_api_view(
        idempotent(check(copied(function)))
    ),
    "mixin, around as_view()": lambda check: check(a_class(handler, *MIXED).as_view()),
}
"""A decorator of a function, that may check the caller, where more than it is protected."""

ABOVE: dict[str, Callable[[Decorator], Any]] = {
    "above @idempotent": lambda check: check(idempotent(copied(function))),
    "far above @idempotent": lambda check: check(csrf_exempt(idempotent(copied(function)))),
    "above @idempotent, below @api_view": lambda check: an_api_view(
        check(idempotent(copied(function)))
    ),
    "above as_view(), @idempotent on a method": lambda check: check(
        a_class(idempotent(handler)).as_view()
    ),
}
"""Above ``@idempotent`` any decorator is fine."""

METHODS: dict[str, Callable[[Decorator], Any]] = {
    "method below @idempotent": lambda check: a_class(idempotent(check(copied(handler)))).as_view(),
    "handler, middleware": lambda check: a_class(check(copied(handler))).as_view(),
    "handler of DRF, middleware": lambda check: a_class(check(copied(handler)), APIView).as_view(),
    "handler, mixin": lambda check: a_class(check(copied(handler)), *MIXED).as_view(),
    "dispatch(), middleware": lambda check: a_class(
        handler, dispatch=check(copied_dispatch)
    ).as_view(),
    "dispatch(), mixin": lambda check: a_class(
        handler, *MIXED, dispatch=check(copied_mixin_dispatch)
    ).as_view(),
    "dispatch() of DRF, middleware": lambda check: a_class(
        handler, APIView, dispatch=check(copied_drf_dispatch)
    ).as_view(),
    "inherited handler": lambda check: type(
        "Sub", (a_class(check(copied(handler))),), {}
    ).as_view(),  # type: ignore[attr-defined]
}

METHODS_ABOVE: dict[str, Callable[[Decorator], Any]] = {
    "above @idempotent": lambda check: a_class(check(idempotent(handler))).as_view(),
    "above @idempotent of DRF": lambda check: a_class(
        check(idempotent(handler)), APIView
    ).as_view(),
}


def copied_dispatch(self: Any, request: Any, *args: Any) -> Any:
    return View.dispatch(self, request, *args)


def copied_drf_dispatch(self: Any, request: Any, *args: Any) -> Any:
    return APIView.dispatch(self, request, *args)


def copied_mixin_dispatch(self: Any, request: Any, *args: Any) -> Any:
    return super(type(self), self).dispatch(request, *args)


ASYNC: dict[str, Callable[[Decorator], Any]] = {
    "below @idempotent": lambda check: idempotent(check(copied(coroutine))),
    "middleware": lambda check: check(copied(coroutine)),
    "middleware, around as_view()": lambda check: check(a_class(ahandler).as_view()),
    "above @idempotent": lambda check: check(idempotent(copied(coroutine))),
}


class Meets:
    """What a caller met."""

    PROTECTED = "protected"
    REFUSED = "refused"


def meet(make: Callable[[], Any], settings: Any, *, asgi: bool = False) -> str:
    """What becomes of three requests with one key, the last of which is without the right."""
    settings.MIDDLEWARE = MIDDLEWARE
    try:
        view = make()
    except (ImproperlyConfigured, AttributeError):  # @api_view needs a __name__
        return Meets.REFUSED
    settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("x/", csrf_exempt(view))]})
    key, reference = new_key(), uuid4().hex

    def send(**headers: str) -> Any:
        allowed[:] = [*headers.values()]
        headers |= {"Idempotency-Key": key, "X-Reference": reference}
        if asgi:
            client = AsyncClient(raise_request_exception=False)
            return async_to_sync(client.post)("/x/", headers=headers)
        return Client(raise_request_exception=False).post("/x/", headers=headers)

    first, second = (send(**{"X-Allowed": "yes"}) for _ in range(2))
    if first.status_code == 201:
        assert is_replay(second)
        assert effects(reference) == 1
    else:
        assert effects(reference) == 0, first.content
    lost = send()
    assert not is_replay(lost), "replayed past the check"
    assert lost.status_code in (400, 403, 500)
    assert b"secret" not in lost.content
    assert effects(reference) == (first.status_code == 201)
    if first.status_code == 201:
        return Meets.PROTECTED
    assert first.status_code in (400, 500)
    if getattr(view, "view_class", None) is not WithAnAttribute:  # known at the request only
        assert any(each.problem for each in endpoints()) or first.status_code == 500
    return Meets.REFUSED


def cases(places: Any, *without: set[str]) -> list[Any]:
    left_out = set().union(*without)
    return [
        pytest.param(make, CHECKS[name], id=f"{place}: {name}")
        for place, make in places.items()
        for name in CHECKS
        if name not in left_out
    ]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("make", "check"),
    [
        *cases(FUNCTIONS),
        *cases(ABOVE),
        *cases(METHODS, OBJECTS, REQUEST_FIRST),
        *cases(METHODS_ABOVE, OBJECTS, REQUEST_FIRST),
    ],
)
def test_everywhere(make: Any, check: Decorator, settings: Any) -> None:
    """Whatever checks the caller does so before each replay, or nothing runs: below ``@idempotent``
    it is refused, above it and around ``as_view()`` it is asked.
    """
    meet(lambda: make(check), settings)


@pytest.mark.django_db
@pytest.mark.parametrize("place", [name for name in FUNCTIONS if "@idempotent" not in name])
def test_unseen(place: str, settings: Any) -> None:
    """What the middleware protects may not hide its view in an object either."""
    meet(lambda: FUNCTIONS[place](by_a_dict), settings)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("make", "check"), cases(ASYNC, SYNC))
@pytest.mark.parametrize("asgi", [False, True])
def test_async(make: Any, check: Decorator, settings: Any, *, asgi: bool) -> None:
    """The same of async views."""
    meet(lambda: make(check), settings, asgi=asgi)


@pytest.mark.django_db
@pytest.mark.parametrize(
    "name", sorted(CHECKS.keys() - OBJECTS - REQUEST_FIRST - {"above-never-cache"})
)
def test_above_is_protected(name: str, settings: Any) -> None:
    """Directly above the function, ``@idempotent`` protects it below any decorator."""
    settings.IDEMPOTENCY = {"MIDDLEWARE_PROTECTS": "with-policy"}
    for place in (*ABOVE.values(), *METHODS_ABOVE.values()):
        assert meet(lambda place=place: place(CHECKS[name]), settings) == Meets.PROTECTED


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["wraps", "name", "above-never-cache"])
@pytest.mark.parametrize("place", [name for name in FUNCTIONS if "around" in name])
def test_around_a_class_is_asked(name: str, place: str, settings: Any) -> None:
    """A decorator with ``functools.wraps`` around ``as_view()`` is asked; the view is protected."""
    assert meet(lambda: FUNCTIONS[place](CHECKS[name]), settings) == Meets.PROTECTED


# Decorators of packages, and Django's own.


FOREIGN: dict[str, Decorator] = {
    "cache_page": cache_page(60),
    "clickjacking": xframe_options_deny,  # leaves an attribute on the response
    "condition": condition(etag_func=lambda request: "x"),
    "method_decorator": method_decorator(never_cache),
    "django-csp": csp_exempt(),  # likewise
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_decorators_are_refused_below(name: str) -> None:
    """Below ``@idempotent``, and in what the middleware protects, with the way out."""
    decorated = FOREIGN[name](copied(function))
    with pytest.raises(ImproperlyConfigured, match=f"directly above the function {__name__}.func"):
        idempotent(decorated)
    assert "Put @idempotent below it" in objection_to(decorated, from_outside=True)


PASSING: dict[str, Decorator] = {
    "atomic": transaction.atomic,
    "atomic()": transaction.atomic(durable=False),
    "csrf_exempt": csrf_exempt,
    "never_cache": never_cache,
    "require_POST": require_POST,
    "vary_on_cookie": vary_on_cookie,
    "sensitive_post_parameters": sensitive_post_parameters("number"),
    "sensitive_variables": sensitive_variables("number"),
    "non_atomic_requests": transaction.non_atomic_requests,
    "extend_schema": extend_schema(summary="Charge"),
    "ddtrace": tracer("trace", "ddtrace.contrib.trace"),
    "newrelic": tracer("trace", NEW_RELIC),
    "two": lambda view: csrf_exempt(transaction.atomic(never_cache(view))),
}


@pytest.mark.django_db
@pytest.mark.parametrize("name", PASSING)
def test_harmless_decorators_pass(name: str, client: Client, settings: Any) -> None:
    """What decides nothing about callers may stand anywhere."""
    passing = PASSING[name]
    settings.MIDDLEWARE = MIDDLEWARE
    for view in (idempotent(passing(copied(function))), passing(copied(function))):
        settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("x/", view)]})
        key, reference = new_key(), uuid4().hex
        headers = {"Idempotency-Key": key, "X-Reference": reference}
        assert not is_replay(client.post("/x/", headers=headers))
        assert is_replay(client.post("/x/", headers=headers))
        assert effects(reference) == 1


@extend_schema_view(post=extend_schema(summary="Charge"))
class Documented(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[Any] = ()
    permission_classes: ClassVar[Any] = ()
    post = handler


class Inheriting(Documented):
    """Has the handler of its base, which drf-spectacular isolates."""


class DocumentedLater(Documented):
    pass


extend_schema_view(post=extend_schema(summary="Again"))(DocumentedLater)


@pytest.mark.django_db
@pytest.mark.parametrize("view_class", [Documented, Inheriting, DocumentedLater])
def test_documented_handlers_pass(view_class: Any, client: Client, settings: Any) -> None:
    """drf-spectacular isolates a handler; it is protected as before."""
    urls = {"urlpatterns": [path("x/", view_class.as_view())]}
    settings.ROOT_URLCONF = type("urls", (), urls)
    headers = {"Idempotency-Key": new_key(), "X-Reference": "documented"}
    assert not is_replay(client.post("/x/", headers=headers))
    assert is_replay(client.post("/x/", headers=headers))


# Mixins of a class, and the class itself.


class Allowed(UserPassesTestMixin):
    raise_exception = True

    def test_func(self) -> bool:
        return bool(self.request.headers.get("X-Allowed") == "yes")  # type: ignore[attr-defined]


class ByMixin(Allowed, View):
    post = handler


class ByASetup(View):
    post = handler

    def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        super().setup(request, *args, **kwargs)
        ask([request])


class ByAnInitial(APIView):
    authentication_classes: ClassVar[Any] = ()
    permission_classes: ClassVar[Any] = ()
    post = handler

    def initial(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        ask([request])


class ByADispatch(View):
    post = handler

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        ask([request])
        return super().dispatch(request, *args, **kwargs)


class AsyncByMixin(Allowed, View):
    post = ahandler


class OfTheBase(ByASetup):
    """A subclass whose base is protected, too."""


class WithAnAttribute(ByMixin):
    """The handler is an attribute of the instance."""

    def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        super().setup(request, *args, **kwargs)
        self.post = wrapping(self.post)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("view_class", "expected"),
    [
        (ByMixin, Meets.PROTECTED),
        (ByASetup, Meets.PROTECTED),
        (ByAnInitial, Meets.PROTECTED),
        (ByADispatch, Meets.PROTECTED),
        (AsyncByMixin, Meets.PROTECTED),
        (OfTheBase, Meets.PROTECTED),
        (WithAnAttribute, Meets.REFUSED),
    ],
)
@pytest.mark.parametrize("asgi", [False, True])
def test_classes(view_class: Any, expected: str, settings: Any, *, asgi: bool) -> None:
    """All that a class checks before its handler is asked for each request."""
    assert meet(view_class.as_view, settings, asgi=asgi) == expected
    assert meet(view_class.as_view, settings, asgi=asgi) == expected  # it is watched once


class Swaps(View):
    """Gives callers without the right another handler, before a replay could be looked for."""

    post = handler

    def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        super().setup(request, *args, **kwargs)
        if allowed != ["yes"]:
            self.post = self.deny  # type: ignore[method-assign]

    def deny(self, request: HttpRequest) -> HttpResponse:
        raise PermissionDenied


class ProtectedBase(View):
    post = idempotent(handler)


class ChecksBefore(ProtectedBase):
    """Its base has placed ``@idempotent`` where its own check is above it."""

    def post(self, request: HttpRequest) -> HttpResponse:
        ask_of_now()
        response: HttpResponse = super().post(request)
        return response


protected_view = idempotent(function)


def calls_a_protected_view(request: HttpRequest) -> HttpResponse:
    ask_of_now()
    response: HttpResponse = protected_view(request)
    return response


class Permitted(View):
    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        ask_of_now()
        return super().dispatch(request, *args, **kwargs)

    post = handler


def calls_a_class(request: HttpRequest) -> Any:
    return Permitted.as_view()(request)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("asgi", [False, True])
@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (Swaps.as_view(), Meets.PROTECTED),
        (ChecksBefore.as_view(), Meets.REFUSED),
        (calls_a_protected_view, Meets.REFUSED),
        (calls_a_class, Meets.REFUSED),
    ],
)
def test_checks_of_another_view(view: Any, expected: str, settings: Any, *, asgi: bool) -> None:
    """A check that a view makes before it calls a protected one, or another class, is asked."""
    assert meet(lambda: view, settings, asgi=asgi) == expected


class LooksAtViews:
    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response
        self.process_view = lambda *args: None

    def __call__(self, request: HttpRequest) -> Any:
        return self.get_response(request)


class Renamed(IdempotencyMiddleware):
    pass


def made_by_a_function(get_response: Any) -> Any:
    return IdempotencyMiddleware(get_response)


OURS = "idempotency_django.middleware.IdempotencyMiddleware"
LOCALE = "django.middleware.locale.LocaleMiddleware"


@pytest.mark.parametrize("ours", [OURS, "Renamed", "made_by_a_function"])
@pytest.mark.parametrize("later", [f"{__name__}.LooksAtViews", LOCALE])
@pytest.mark.parametrize("is_async", [False, True])
def test_later_middleware(ours: str, later: str, settings: Any, *, is_async: bool) -> None:
    """What gets its ``process_view`` when it is made would be skipped, too."""
    ours = f"{__name__}.{ours}" if "." not in ours else ours
    settings.MIDDLEWARE = [ours, later, OURS]
    with pytest.raises(ImproperlyConfigured, match="not the last in MIDDLEWARE"):
        BaseHandler().load_middleware(is_async=is_async)


# Methods that a handler passes its work to.

guard = method_decorator(permission_required("tests.add_effect", raise_exception=True))


class GuardedCreate(generics.CreateAPIView):
    """``post()`` is REST framework's, and calls the decorated method."""

    create = guard(handler)


class GuardedSave(generics.CreateAPIView):
    """A check below ``create()``, which is REST framework's as well."""

    @guard
    def perform_create(self, serializer: Any) -> None: ...


class GuardedAction(mixins.CreateModelMixin, generics.GenericAPIView[Any]):
    """``post()`` is the project's own, and calls what REST framework's would."""

    create = guard(handler)

    def post(self, request: Request) -> Any:
        return self.create(request)


class GuardedBase(View):
    post = guard(handler)


class BySuper(GuardedBase):
    """The decorated handler is another class's."""

    def post(self, request: HttpRequest) -> HttpResponse:
        response: HttpResponse = super().post(request)
        return response


class ByName(GuardedBase):
    """Likewise."""

    def post(self, request: HttpRequest) -> HttpResponse:
        response: HttpResponse = GuardedBase.post(self, request)
        return response


class GuardedForm(FormView):
    """``post()`` is Django's, and calls the decorated method."""

    form_valid = guard(handler)


@pytest.mark.parametrize(
    ("view_class", "name"),
    [
        (GuardedCreate, "post"),
        (GuardedSave, "post"),
        (GuardedAction, "post"),
        (type("Create", (GuardedSave, viewsets.ModelViewSet), {}), "create"),
        (BySuper, "post"),
        (ByName, "post"),
        (GuardedForm, "post"),
    ],
)
def test_what_a_handler_passes_its_work_to(view_class: Any, name: str) -> None:
    """A framework's handler calls methods of the view, and ``super()`` one of a base: their
    decorators would not run before a replay, either.
    """
    assert "Put @idempotent below it" in objection_to_handler(view_class, name)


class Plain(viewsets.ModelViewSet):
    """What decides nothing about callers may stand on such methods, too."""

    @transaction.atomic
    def perform_create(self, serializer: Any) -> None: ...

    @functools.cache  # noqa: B019  # a lookup does no work
    def get_queryset(self) -> Any: ...

    def update(self, *args: Any, **kwargs: Any) -> Any:
        return super().update(*args, **kwargs)


@pytest.mark.parametrize("name", ["create", "update", "partial_update", "destroy"])
def test_harmless_methods_below_a_handler(name: str) -> None:
    """They are protected."""
    assert objection_to_handler(Plain, name) == ""
