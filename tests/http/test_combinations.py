"""Every decorator around every kind of view, wherever it is protected: checks and requests agree.

A case is a decorator, a level (around the view, a handler, ``dispatch()``), a kind of view, and a
place: inside the decorator (``@idempotent``, the mixin), outside of it, or the middleware. What is
inside is protected, whatever is around it. Outside, known decorators are opened, and all others are
refused, by ``check`` (E022) and for a request alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.http import HttpResponse
from django.test import Client
from django.urls import path
from django.utils.decorators import decorator_from_middleware, method_decorator
from django.utils.deprecation import MiddlewareMixin
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt, csrf_protect
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_POST
from django.views.decorators.vary import vary_on_headers
from django.views.generic import View

from idempotency_django.checks.inventory import endpoints
from idempotency_django.checks.views import check_views
from idempotency_django.decorators import idempotency_exempt, idempotent, part_of_view
from tests.support import ways
from tests.support.nightly import nightly
from tests.support.shared import assert_problem, effects, is_replay, new_key, post

Decorator = Callable[[Any], Any]


def ask(request: Any) -> None:
    """What a decorator of the project checks."""
    if request.headers.get("X-Allowed") != "yes":
        raise PermissionDenied


def like(view: Any, inner: Any) -> Any:
    """The wrapper, async as its view is."""
    return markcoroutinefunction(inner) if iscoroutinefunction(view) else inner


def hiding(view: Any) -> Any:
    def inner(*args: Any, **kwargs: Any) -> Any:
        ask(args[-1])
        return view(*args, **kwargs)

    return like(view, inner)


def wrapping(view: Any) -> Any:
    return functools.wraps(view)(hiding(view))


def by_a_default(view: Any) -> Any:
    def inner(*args: Any, view: Any = view) -> Any:
        ask(args[-1])
        return view(*args)

    return like(view, inner)


def by_a_helper(view: Any) -> Any:
    helper = hiding(view)
    return like(view, lambda *args: helper(*args))  # noqa: PLW0108


class Guard:
    """What a decorator leaves the call to."""

    def __init__(self, view: Any) -> None:
        self.view = view

    def run(self, *args: Any) -> Any:
        """Ask, and call the view."""
        ask(args[-1])
        return self.view(*args)


class Called(Guard):
    """An object in the place of a view."""

    def __init__(self, view: Any) -> None:
        super().__init__(view)
        like(view, self)

    def __call__(self, *args: Any) -> Any:
        """Ask, and call the view."""
        return self.run(*args)


class Slotted:
    """The same, without a ``__dict__``."""

    __slots__ = ("view",)

    def __init__(self, view: Any) -> None:
        self.view = view

    def run(self, *args: Any) -> Any:
        """Ask, and call the view."""
        ask(args[-1])
        return self.view(*args)


def by_an_object(view: Any) -> Any:
    guard = Guard(view)
    return like(view, lambda *args: guard.run(*args))  # noqa: PLW0108


def by_slots(view: Any) -> Any:
    guard = Slotted(view)
    return like(view, lambda *args: guard.run(*args))  # noqa: PLW0108


def by_a_bound_method(view: Any) -> Any:
    run = Guard(view).run
    return like(view, lambda *args: run(*args))  # noqa: PLW0108


def by_a_dict(view: Any) -> Any:
    views = {"POST": hiding(view)}
    return like(view, lambda *args: views["POST"](*args))  # noqa: PLW0108


VIEWS: dict[str, Any] = {}


def wrapping_by_name(view: Any) -> Any:
    """It says what it wraps, and holds a name only."""
    name = uuid4().hex
    VIEWS[name] = view

    @functools.wraps(view)
    def inner(*args: Any) -> Any:
        ask(args[-1])
        return VIEWS[name](*args)

    return like(view, inner)


def by_a_partial(view: Any) -> Any:
    def call(view: Any, *args: Any) -> Any:
        ask(args[-1])
        return view(*args)

    return functools.partial(like(view, call), view)


def with_an_own_check(view: Any) -> Any:
    """Without ``functools.wraps``, and with another function beside the view."""

    def check(request: Any) -> bool:
        return bool(request.headers.get("X-Allowed") == "yes")

    def inner(*args: Any) -> Any:
        if not check(args[-1]):
            raise PermissionDenied
        return view(*args)

    return like(view, inner)


class Middleware(MiddlewareMixin):
    """A middleware of a project, for ``decorator_from_middleware``."""

    def process_view(self, request: Any, *rest: Any) -> None:
        """Ask."""
        ask(request)


KNOWN: dict[str, Decorator] = {
    "none": lambda view: view,
    "permission_required": ways.guard,
    "login_required": login_required,
    "csrf_exempt": csrf_exempt,
    "csrf_protect": csrf_protect,
    "never_cache": never_cache,
    "require_POST": require_POST,
    "vary": vary_on_headers("Accept"),
    "sensitive": sensitive_post_parameters("number"),
    "decorator_from_middleware": decorator_from_middleware(Middleware),
    "partial": functools.partial,
    "two": lambda view: csrf_exempt(ways.guard(never_cache(view))),
}

SYNC = {"csrf_protect", "decorator_from_middleware", "partial"}
"""Those of them that Django cannot put around an async view."""

OF_DJANGO = {"sensitive"}
"""Those of them that refuse REST framework's request."""

UNKNOWN: dict[str, Decorator] = {
    "wrapping": wrapping,
    "wrapping-by-name": wrapping_by_name,
    "hiding": hiding,
    "default": by_a_default,
    "helper": by_a_helper,
    "object": by_an_object,
    "slots": by_slots,
    "bound-method": by_a_bound_method,
    "dict": by_a_dict,
    "own-check": with_an_own_check,
    "hiding-twice": lambda view: hiding(by_an_object(view)),
}

AROUND_VIEWS: dict[str, Decorator] = {
    "wrapping-below-known": lambda view: never_cache(wrapping(view)),
    "hiding-below-known": lambda view: never_cache(hiding(view)),
    "wrapping-above-known": lambda view: wrapping(ways.guard(view)),
    "hiding-above-known": lambda view: hiding(ways.guard(view)),
    "called-object": Called,
}
"""Unknown, too; they stand around views only: they need Django's request first, or are objects."""

AROUND_SYNC_VIEWS: dict[str, Decorator] = {
    "bound-method-itself": lambda view: Guard(view).run,
    "partial-of-a-call": by_a_partial,
    "wrapping-partial": lambda view: wrapping(functools.partial(view)),
}
"""… and Django itself cannot tell that an async view is inside."""

DECORATORS = {**KNOWN, **UNKNOWN, **AROUND_VIEWS, **AROUND_SYNC_VIEWS}

SHORT = {
    *("none", "permission_required", "wrapping", "hiding", "marked-hiding"),
}
"""Those with which ``make test`` combines everything; ``make nightly`` takes all decorators."""


def combined_with(*names: str) -> Any:
    """Runs a test for each of these decorators."""
    return pytest.mark.parametrize(
        "name", [name if name in SHORT else nightly(name) for name in sorted(names)]
    )


MARKED = {
    f"marked-{name}": lambda view, make=make: part_of_view(make(view))
    for name, make in {**UNKNOWN, **AROUND_VIEWS}.items()
}
"""What their author calls a part of the view: protected from outside, and run once with it."""


@dataclass(frozen=True)
class Case:
    """One combination.

    Attributes:
        name: what it is.
        make: makes the view; ``@idempotent`` may refuse at once.
        inside: it is protected inside of the decorator.
        middleware: the middleware is installed.
    """

    name: str
    make: Callable[[], Any]
    inside: bool
    middleware: bool


def a_function() -> Any:
    """A function view of its own, which may be marked."""

    def view(request: Any) -> HttpResponse:
        return ways.create(request)

    return view


once = idempotent(mode="auto")
SYNC_KINDS: dict[str, Callable[[], Any]] = {
    "function": a_function,
    "class": lambda: ways.a_class(ways.handler()).as_view(),
    "drf": lambda: ways.a_class(ways.handler(), ways.Base).as_view(),
    "api-view": ways.api,
    "viewset": lambda: ways.ViewSet.as_view({"post": "create"}),
}
ASYNC_KINDS: dict[str, Callable[[], Any]] = {
    "async-function": lambda: ways.aplain,
    "async-class": lambda: ways.a_class(ways.ahandler()).as_view(),
}
SYNC_INSIDE: dict[str, Callable[[], Any]] = {
    "function": lambda: once(ways.plain),
    "function-above-known": lambda: once(ways.guard(ways.plain)),
    "handler": lambda: ways.a_class(once(ways.handler())).as_view(),
    "handler-decorated": lambda: ways.a_class(method_decorator(once)(ways.handler())).as_view(),
    "class": lambda: once(ways.a_class(ways.handler())).as_view(),
    "as-view": lambda: once(ways.a_class(ways.handler()).as_view()),
    "dispatch": lambda: method_decorator(once, name="dispatch")(
        ways.a_class(ways.handler())
    ).as_view(),
    "drf-handler": lambda: ways.a_class(once(ways.handler()), ways.Base).as_view(),
    "drf-class": lambda: once(ways.a_class(ways.handler(), ways.Base)).as_view(),
    "below-api-view": lambda: ways.api(once),
    "above-api-view": lambda: once(ways.api()),
    "mixin": lambda: ways.a_class(ways.handler(), *ways.mixed(ways.Base)).as_view(),
    "mixin-viewset": lambda: type("V", ways.mixed(ways.ViewSet), {}).as_view({"post": "create"}),
}
ASYNC_INSIDE: dict[str, Callable[[], Any]] = {
    "async-function": lambda: once(ways.aplain),
    "async-handler": lambda: ways.a_class(once(ways.ahandler())).as_view(),
    "async-class": lambda: once(ways.a_class(ways.ahandler())).as_view(),
}


def around_views(decorator: Decorator, kinds: Any, inside: Any) -> Iterator[Case]:
    """The decorator around what the URL leads to."""
    for kind, make in kinds.items():
        yield Case(f"middleware {kind}", lambda make=make: decorator(make()), False, True)
        for middleware in (False, True):
            outside = lambda make=make: once(decorator(make()))  # noqa: E731
            yield Case(f"outside {kind}", outside, False, middleware)
    for place, make in inside.items():
        for middleware in (False, True):
            within = lambda make=make: decorator(make())  # noqa: E731
            yield Case(f"inside {place}", within, True, middleware)


def around_handlers(decorator: Decorator) -> Iterator[Case]:
    """The decorator around a handler, or around the function of an ``@api_view``."""

    def a_class(post: Any, *bases: type) -> Any:
        return ways.a_class(post, *bases).as_view()

    for bases in ((), (ways.Base,)):
        kind = "drf" if bases else "django"
        bare = lambda bases=bases: a_class(decorator(ways.handler()), *bases)  # noqa: E731
        deep = lambda bases=bases: a_class(decorator(once(ways.handler())), *bases)  # noqa: E731
        above = lambda bases=bases: a_class(once(decorator(ways.handler())), *bases)  # noqa: E731
        yield Case(f"middleware {kind}", bare, False, True)
        for extra in (False, True):
            yield Case(f"class {kind}", lambda bare=bare: once(bare()), False, extra)
            yield Case(f"above {kind}", above, False, extra)
            yield Case(f"inside {kind}", deep, True, extra)
            yield Case(f"inside class {kind}", lambda deep=deep: once(deep()), True, extra)
    mixed = ways.mixed(ways.Base)
    yield Case("middleware api-view", lambda: ways.api(decorator), False, True)
    for extra in (False, True):
        yield Case("mixin", lambda: a_class(decorator(ways.handler()), *mixed), False, extra)
        yield Case(
            "inside mixin", lambda: a_class(decorator(once(ways.handler())), *mixed), True, extra
        )
        yield Case("above api-view", lambda: once(ways.api(decorator)), False, extra)
        yield Case("in api-view", lambda: ways.api(once, decorator), False, extra)
        yield Case("inside api-view", lambda: ways.api(decorator, once), True, extra)


def by_method_decorator(decorator: Decorator) -> Iterator[Case]:
    """``method_decorator`` puts it on at each call, so it may be any."""
    put = method_decorator(decorator)
    on_dispatch = method_decorator(decorator, name="dispatch")
    for bases in ((), (ways.Base,)):
        handled = lambda bases=bases: ways.a_class(put(ways.handler()), *bases)  # noqa: E731
        deep = lambda bases=bases: ways.a_class(put(once(ways.handler())), *bases)  # noqa: E731
        dispatched = lambda bases=bases: on_dispatch(ways.a_class(ways.handler(), *bases))  # noqa: E731
        for make in (handled, deep, dispatched):
            yield Case("middleware", lambda make=make: make().as_view(), False, True)
            for extra in (False, True):
                yield Case("class", lambda make=make: once(make()).as_view(), False, extra)
                yield Case("as-view", lambda make=make: once(make().as_view()), False, extra)
        yield Case("inside", lambda deep=deep: deep().as_view(), True, False)
    mixed = ways.mixed(ways.Base)
    yield Case(
        "mixin handler", lambda: ways.a_class(put(ways.handler()), *mixed).as_view(), False, False
    )
    yield Case(
        "mixin dispatch",
        lambda: on_dispatch(ways.a_class(ways.handler(), *mixed)).as_view(),
        False,
        False,
    )


def around_dispatch(decorator: Decorator) -> Iterator[Case]:
    """The decorator around ``dispatch()``, and ``@idempotent`` around both."""

    def a_class(base: Any) -> Any:
        return ways.a_class(ways.handler(), base, dispatch=decorator(base.dispatch))

    on_dispatch = method_decorator(once, name="dispatch")
    for base in (View, ways.Base):
        for extra in (False, True):
            above = lambda base=base: on_dispatch(a_class(base)).as_view()  # noqa: E731
            yield Case("dispatch", above, False, extra)


def unprotected(decorator: Decorator) -> Iterator[Case]:
    """Nothing protects the view, or it is exempt."""
    for kind, make in SYNC_KINDS.items():
        yield Case(f"bare {kind}", lambda make=make: decorator(make()), False, False)
        exempt = lambda make=make: idempotency_exempt(decorator(make()))  # noqa: E731
        yield Case(f"exempt {kind}", exempt, False, True)


def verdict(
    case: Case, client: Client, settings: Any, *, withdrawn: bool = True
) -> tuple[str, str]:
    """What the check says of a case, and what two requests with one key met."""
    settings.MIDDLEWARE = (
        ways.MIDDLEWARE
        if case.middleware
        else [m for m in ways.MIDDLEWARE if not m.startswith("idempotency_django.")]
    )
    try:
        view = case.make()
    except ImproperlyConfigured:
        return "refused", "refused"  # when the module is imported
    settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("x/", view)]})
    said = {message.id for message in check_views()}
    how = {endpoint.how for endpoint in endpoints()}
    checked = "alone" if how <= {"", "exempt"} else "protected"
    if "idempotency_django.E022" in said:
        checked = "refused"

    def send(key: str, **headers: str) -> HttpResponse:
        return post(client, "/x/", key, reference, headers=headers)

    reference, key = uuid4().hex, new_key()
    try:
        first = send(key, **{"X-Allowed": "yes"})
        if first.status_code == 400:  # by the middleware
            assert_problem(first, 400, "key-unsupported")
            assert effects(reference) == 0
            return checked, "refused"
        assert first.status_code == 201, first.content
        second = send(key, **{"X-Allowed": "yes"})
    except ImproperlyConfigured:
        assert effects(reference) == 0
        return checked, "refused"
    done = effects(reference)
    assert is_replay(second) == (done == 1)
    if withdrawn and done == 1:
        # A caller whom the decorator refuses with a new key is refused with this one, too.
        alice = User.objects.get()
        permission = alice.user_permissions.get()
        alice.user_permissions.clear()
        refused = send(new_key()).status_code == 403
        third = send(key)
        alice.user_permissions.add(permission)
        assert is_replay(third) != refused, "replayed past the decorator"
        assert (third.status_code == 403) == refused
    return checked, {1: "protected", 2: "alone"}[done]


def assert_agrees(
    cases: Iterator[Case], client: Client, settings: Any, outside: str, *, withdrawn: bool = True
) -> None:
    """Each case is what is expected of it, for ``check`` and for a request alike."""
    wrong = []
    for case in cases:
        expected = "protected" if case.inside else outside
        met = verdict(case, client, settings, withdrawn=withdrawn)
        if met != (expected, expected):
            wrong.append(f"{case.name}, middleware {case.middleware}: {met}, not {expected}")
    assert wrong == []


def outside_of(name: str) -> str:
    return "protected" if name in KNOWN else "refused"


@pytest.mark.django_db
@combined_with(*DECORATORS)
def test_around_views(name: str, alice: Client, settings: Any) -> None:
    """Around a view: what is protected inside stays so; outside, unknown decorators are refused."""
    cases = around_views(DECORATORS[name], SYNC_KINDS, SYNC_INSIDE)
    assert_agrees(cases, alice, settings, outside_of(name))


@pytest.mark.django_db(transaction=True)
@combined_with(*KNOWN.keys() - SYNC, *UNKNOWN, *AROUND_VIEWS)
def test_around_async_views(name: str, alice: Client, settings: Any) -> None:
    """The same of async views."""
    cases = around_views(DECORATORS[name], ASYNC_KINDS, ASYNC_INSIDE)
    assert_agrees(cases, alice, settings, outside_of(name))


@pytest.mark.django_db
@combined_with("none", *UNKNOWN)
def test_around_handlers(name: str, alice: Client, settings: Any) -> None:
    """Around a handler or the function of an ``@api_view``: the same."""
    assert_agrees(around_handlers(DECORATORS[name]), alice, settings, outside_of(name))


@pytest.mark.django_db
@combined_with(*KNOWN.keys() - OF_DJANGO, *UNKNOWN)
def test_method_decorator(name: str, alice: Client, settings: Any) -> None:
    """``method_decorator`` may put any decorator on: it runs for every request."""
    assert_agrees(by_method_decorator(DECORATORS[name]), alice, settings, "protected")


@pytest.mark.django_db
@combined_with("none", *UNKNOWN)
def test_around_dispatch(name: str, alice: Client, settings: Any) -> None:
    """``@idempotent`` above a decorator of ``dispatch()`` is above one of a function."""
    assert_agrees(around_dispatch(DECORATORS[name]), alice, settings, outside_of(name))


@pytest.mark.django_db
@combined_with(*KNOWN, *UNKNOWN)
def test_unprotected(name: str, alice: Client, settings: Any) -> None:
    """Where nothing protects a view, nothing is said and nothing is refused."""
    assert_agrees(unprotected(DECORATORS[name]), alice, settings, "alone")


@pytest.mark.django_db
@combined_with(*MARKED)
def test_part_of_view(name: str, alice: Client, settings: Any) -> None:
    """What its author calls a part of the view is protected from outside, and runs once with it."""
    assert_agrees(
        around_views(MARKED[name], SYNC_KINDS, SYNC_INSIDE),
        alice,
        settings,
        "protected",
        withdrawn=False,
    )
