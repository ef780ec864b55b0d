"""Which decorators are opened, and what an opened view keeps."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import json
import logging
import weakref
from functools import partial
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.views.decorators import staff_member_required
from django.contrib.auth.decorators import login_not_required, login_required, permission_required
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory
from django.urls import path
from django.utils.decorators import decorator_from_middleware, method_decorator
from django.utils.deprecation import MiddlewareMixin
from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext_lazy
from django.views.decorators import (
    cache,
    clickjacking,
    common,
    csrf,
    debug,
    gzip,
    http,
    vary,
)
from django.views.generic import View
from django.views.static import serve

from idempotency_django.decorators import part_of_view
from idempotency_django.http import unwrapping
from idempotency_django.http.unwrapping import cached_on, innermost, name_of, protect_innermost
from tests.support import ways
from tests.support.shared import new_key


class Middleware(MiddlewareMixin):
    """A middleware of a project, for ``decorator_from_middleware``."""


def view(request: HttpRequest) -> HttpResponse:
    return HttpResponse("once", "text/plain")


async def aview(request: HttpRequest) -> HttpResponse:
    return HttpResponse("once", "text/plain")


DECORATORS: dict[str, Any] = {
    "login_required": login_required,
    "login_not_required": login_not_required,
    "permission_required": permission_required("tests.add_effect"),
    "staff_member_required": staff_member_required,
    "admin_view": admin.site.admin_view,
    "admin_view, cached": lambda view: admin.site.admin_view(view, cacheable=True),
    "cache_control": cache.cache_control(private=True),
    "cache_page": cache.cache_page(1),
    "never_cache": cache.never_cache,
    "xframe_options_deny": clickjacking.xframe_options_deny,
    "xframe_options_exempt": clickjacking.xframe_options_exempt,
    "xframe_options_sameorigin": clickjacking.xframe_options_sameorigin,
    "no_append_slash": common.no_append_slash,
    "csrf_exempt": csrf.csrf_exempt,
    "csrf_protect": csrf.csrf_protect,
    "ensure_csrf_cookie": csrf.ensure_csrf_cookie,
    "requires_csrf_token": csrf.requires_csrf_token,
    "sensitive_post_parameters": debug.sensitive_post_parameters("number"),
    "sensitive_variables": debug.sensitive_variables("number"),
    "gzip_page": gzip.gzip_page,
    "conditional_page": http.conditional_page,
    "condition": http.condition(etag_func=lambda request: None),
    "require_POST": http.require_POST,
    "vary_on_cookie": vary.vary_on_cookie,
    "vary_on_headers": vary.vary_on_headers("Accept"),
    "decorator_from_middleware": decorator_from_middleware(Middleware),
    "atomic": transaction.atomic,
    "partial": partial,
}
"""Django's decorators, all of them."""


@pytest.mark.parametrize("name", DECORATORS)
def test_django_decorators_are_known(name: str) -> None:
    """Each is opened, alone and around another; a condition on the function is a part of it."""
    alone = DECORATORS[name](view)
    for decorated in (alone, DECORATORS[name](login_required(view))):
        inside: list[Any] = []
        again = protect_innermost(
            decorated, lambda function, inside=inside: inside.append(function) or view
        )
        assert inside == [alone if (name, decorated) == ("condition", alone) else view]
        if inside == [alone]:
            continue
        assert innermost(decorated) is view
        assert vars(again).keys() >= vars(decorated).keys() - {"__wrapped__"}


@pytest.mark.parametrize("name", ["login_required", "never_cache", "require_POST"])
def test_async(name: str) -> None:
    """Around an async view they are opened likewise, where Django lets them stand there."""
    inside: list[Any] = []
    protect_innermost(DECORATORS[name](aview), lambda function: inside.append(function) or function)
    assert inside == [aview]


def test_list_is_complete() -> None:
    """Every decorator in Django's modules of decorators is in the list above."""
    import pkgutil
    from importlib import import_module

    import django.views.decorators as package

    missing = set()
    for module in pkgutil.iter_modules(package.__path__):
        names = vars(import_module(f"{package.__name__}.{module.name}"))
        missing |= {
            name
            for name, value in names.items()
            if getattr(value, "__module__", "").startswith(package.__name__)
            and callable(value)
            and not isinstance(value, type)
            and not name.startswith("_")
        }
    made_of_require_http_methods = {"require_http_methods", "require_GET", "require_safe"}
    made_of_condition = {"etag", "last_modified"}
    new_in_django_6 = {"csp_override", "csp_report_only_override"}
    known = made_of_require_http_methods | made_of_condition | new_in_django_6 | DECORATORS.keys()
    assert missing - known == set()


def test_csp_decorators() -> None:
    """Those for a content security policy, which came with Django 6."""
    csp = pytest.importorskip("django.views.decorators.csp")
    inside: list[Any] = []
    decorated = csp.csp_override({})(view)
    protect_innermost(decorated, lambda function: inside.append(function) or function)
    assert inside == [view]


def test_derived_methods_of_a_schema() -> None:
    """A method that drf-spectacular has isolated, for ``@extend_schema_view``, is seen through."""
    source = """
import functools

def isolate_view_method(view, method_name):
    method = getattr(view, method_name)

    @functools.wraps(method)
    def wrapped_method(self, request, *args, **kwargs):
        return method(self, request, *args, **kwargs)

    return wrapped_method
"""
    names: dict[str, Any] = {"__name__": "drf_spectacular.drainage"}
    exec(source, names)
    inside: list[Any] = []
    isolated = names["isolate_view_method"](ways.ViewSet, "pay")
    protect_innermost(isolated, lambda function: inside.append(function) or function)
    assert [function.__code__.co_name for function in inside] == ["pay"]


@pytest.mark.django_db
@pytest.mark.parametrize("odd", ways.UNKNOWN)
def test_method_decorator_takes_any_decorator(
    admin_client: Client, settings: Any, odd: str
) -> None:
    """``method_decorator`` puts its decorators on at each call: even those that nobody knows."""
    settings.MIDDLEWARE = ways.MIDDLEWARE

    class Decorated(View):
        @method_decorator(ways.UNKNOWN[odd])
        def post(self, request: HttpRequest) -> HttpResponse:
            return ways.create(request)

    urls = type("urls", (), {"urlpatterns": [path("x/", Decorated.as_view())]})
    settings.ROOT_URLCONF = urls
    if odd in ("object", "wrapping-object"):
        pytest.skip("Django cannot put an object on a method")
    from tests.support.shared import assert_replays, effects, new_key, post

    key = new_key()
    assert_replays(post(admin_client, "/x/", key), post(admin_client, "/x/", key))
    assert effects() == 1


def test_name_of_a_decorator() -> None:
    """An error names the decorator by its own name, not by the one that it took from the view."""
    with pytest.raises(ImproperlyConfigured) as refused:
        protect_innermost(ways.unknown(view), lambda function: function)
    assert str(refused.value).startswith(
        "tests.support.ways.unknown.<locals>.inner is wrapped by, or contains, a"
    )
    assert f"Put @idempotent on {__name__}.view itself" in str(refused.value)
    assert name_of(ways.OwnDispatch.as_view()) == "tests.support.ways.OwnDispatch"


def test_decorator_of_another_version(monkeypatch: Any) -> None:
    """A decorator of Django that holds other values than those that are known is refused."""
    path = "django.contrib.auth.decorators.user_passes_test"
    monkeypatch.setitem(unwrapping._KNOWN, path, lambda held: held["something_new"])
    with pytest.raises(ImproperlyConfigured, match="below all decorators"):
        protect_innermost(login_required(view), lambda function: function)


def charge(amount: int) -> int:
    """What a view does its work with."""
    return amount


class Charges:
    """The same, as an object."""

    def __init__(self) -> None:
        self.currency = "EUR"

    def charge(self, amount: int) -> int:
        """Do the work."""
        return amount


def unasked() -> Any:
    """What makes a lazy object."""
    raise AssertionError("a lazy object was made to do its work")


def around(held: Any) -> Any:
    """A view that holds something for its work."""

    def made(request: HttpRequest) -> HttpResponse:
        return HttpResponse(str(held))

    return made


class Named(str):
    """A text on which a view hangs."""

    view: Any


def named(text: str) -> Named:
    held = Named(text)
    held.view = charge
    return held


class TestHeld:
    """What a view may hold: data, and nothing else."""

    @pytest.mark.parametrize(
        "held",
        [
            pytest.param(held, id=name)
            for name, held in {
                "class": Charges,
                "module": json,
                "list": ["EUR", 1, None],
                "dict": {"currency": ["EUR"]},
                "text to be translated": gettext_lazy("Amount"),
                "enum": inspect.Parameter.VAR_KEYWORD,
            }.items()
        ],
    )
    def test_accepted(self, held: Any) -> None:
        """Data, a class, a module; in a variable around it, in a default, or in its object."""
        inside: list[Any] = []

        def default(request: HttpRequest, held: Any = held) -> HttpResponse:
            return HttpResponse(str(held))

        site = ways.Site()
        site.held = held  # type: ignore[attr-defined]
        protect_innermost(
            made := around(held), lambda function: inside.append(function) or function
        )
        protect_innermost(default, lambda function: inside.append(function) or function)
        protect_innermost(site.plain, lambda function: inside.append(function) or function)
        assert inside == [made, default, ways.Site.plain]

    @pytest.mark.parametrize(
        "held",
        [
            pytest.param(held, id=name)
            for name, held in {
                "function": charge,
                "function without arguments": lambda: 1,
                "function of the standard library": json.dumps,
                "method": Charges().charge,
                "method of the standard library": logging.getLogger("x").info,
                "partial": partial(charge),
                "cached": functools.lru_cache(charge),
                "list": [charge],
                "dict in a dict": {"views": {"POST": charge}},
                "key of a dict": {charge: "POST"},
                "attribute of a text": named("charge"),
                "object": Charges(),
                "object with slots": ways.SlottedGuard(charge),
                "lazy object": SimpleLazyObject(unasked),
                "context manager as a decorator": contextlib.ContextDecorator()(charge),
                "class-based view": View.as_view(),
                "class of a view": View,
                "function of a request in Django": serve,
            }.items()
        ],
    )
    def test_refused(self, held: Any) -> None:
        """A function or an object may run a view, so what holds one is refused, wherever it is."""

        def default(request: HttpRequest, held: Any = held) -> HttpResponse:
            return HttpResponse(str(held))

        def keyword(request: HttpRequest, *, held: Any = held) -> HttpResponse:
            return HttpResponse(str(held))

        site = ways.Site()
        site.held = held  # type: ignore[attr-defined]
        for made in (around(held), default, keyword, site.plain, partial(default, held=held)):
            with pytest.raises(ImproperlyConfigured, match="Put @idempotent on"):
                protect_innermost(made, lambda function: function)

    def test_of_an_author(self) -> None:
        """What its author calls a part of the view is protected as a whole; a copy is not."""
        made = part_of_view(around(charge))
        inside: list[Any] = []
        protect_innermost(made, lambda function: inside.append(function) or function)
        assert inside == [made]
        copied = functools.wraps(made)(around(charge))
        with pytest.raises(ImproperlyConfigured, match=r"part_of_view\("):
            protect_innermost(copied, lambda function: function)

    def test_super(self) -> None:
        """The class that ``super()`` needs is no view that a handler holds."""

        class Calling(View):
            def post(self, request: HttpRequest) -> HttpResponse:
                return super().http_method_not_allowed(request)

        inside: list[Any] = []
        protect_innermost(Calling.post, lambda function: inside.append(function) or function)
        assert inside == [Calling.post]

    def test_way_out(self) -> None:
        """What calls such a view by its name is a view of its own."""
        made = around(charge)
        names: dict[str, Any] = {"made": made}
        exec("def pay(request): return made(request)", names)
        inside: list[Any] = []
        protect_innermost(names["pay"], lambda function: inside.append(function) or function)
        assert inside == [names["pay"]]


class TestKept:
    """What is made of a view is kept with it."""

    def test_once(self) -> None:
        """It is made once for each view, also for a method."""
        made: list[int] = []
        for kept_by in (lambda request: None, ways.Site().plain):
            first = cached_on(kept_by, "_test", lambda: made.append(1) or object())
            assert cached_on(kept_by, "_test", lambda: made.append(1) or object()) is first
        assert len(made) == 2

    def test_copied_attributes_do_not_count(self) -> None:
        """A decorator that copies the attributes of a view has its own."""

        def inner(request: HttpRequest) -> HttpResponse:
            return HttpResponse()

        cached_on(inner, "_test", lambda: "inner")
        assert cached_on(login_required(inner), "_test", lambda: "outer") == "outer"

    def test_freed(self, settings: Any) -> None:
        """A view that is gone is freed, with what the middleware made of it."""
        from idempotency_django.middleware import IdempotencyMiddleware

        def make() -> Any:
            def gone(request: HttpRequest) -> HttpResponse:
                return HttpResponse()

            return gone

        middleware = IdempotencyMiddleware(lambda request: HttpResponse())
        views = [make(), login_required(make()), ways.a_class(ways.handler()).as_view()]
        request = RequestFactory().post("/", headers={"Idempotency-Key": new_key()})
        for each in views:
            known = middleware._to_protect(request, each)
            assert known is not None
            assert known.protected is not each
        references = [weakref.ref(each) for each in views]
        views.clear()
        del each, known, request
        gc.collect()
        assert [reference() for reference in references] == [None] * 3


@pytest.mark.django_db
def test_opened_once_for_each_function(settings: Any) -> None:
    """A decorated handler is opened once, not for each request."""
    from idempotency_django.http import wrapping

    calls: list[Any] = []

    class Counted(View):
        @method_decorator(login_required)
        def post(self, request: HttpRequest) -> HttpResponse:
            return ways.create(request)

    def counting(function: Any, protect: Any) -> Any:
        calls.append(function)
        return protect_innermost(function, protect)

    original, wrapping.protect_innermost = wrapping.protect_innermost, counting
    try:
        from idempotency_django.decorators import idempotent

        protected = idempotent(Counted).as_view()
        for _ in range(3):
            request = RequestFactory().post("/", '{"reference": "a"}', "application/json")
            request.user = User(pk=1, username="alice")
            protected(request)
    finally:
        wrapping.protect_innermost = original
    assert len(calls) == 1
