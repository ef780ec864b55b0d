"""Views of frameworks that have no adapter: refused by a check and at run time, or exempt."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.generic import View

from idempotency_django.decorators import idempotent
from tests.models import Effect
from tests.support import ways
from tests.support.shared import assert_problem, effects, new_key, post

pytestmark = pytest.mark.django_db


def work(request: HttpRequest) -> HttpResponse:
    """What the framework does in the end; its caller is known to it alone."""
    Effect.objects.create(reference="a")
    return HttpResponse(status=201)


# Each as its framework writes it.
OPERATION = """
def get_view(work):
    class PathView:
        def sync_view(self, request, *args, **kwargs):
            return work(request)

    path_view = PathView()

    def sync_view_wrapper(request, *args, **kwargs):
        return path_view.sync_view(request, *args, **kwargs)

    sync_view_wrapper.csrf_exempt = True
    return sync_view_wrapper
"""
DISPATCH = """
class GraphQLView(View):
    work = None

    def dispatch(self, request, *args, **kwargs):
        return self.work(request)
"""
HANDLER = """
class GraphQLView(View):
    work = None

    def post(self, request, *args, **kwargs):
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


def a_graphql_view(module: str, source: str = DISPATCH) -> Any:
    """A project's subclass of a framework's view."""
    return type("ProjectView", (of(module, source)["GraphQLView"],), {"__module__": "shop.views"})


VIEWS: dict[str, Any] = {
    "ninja": of("ninja.operation", OPERATION)["get_view"](work),
    "ninja_extra": of("ninja_extra.x", OPERATION)["get_view"](work),
    "strawberry": a_graphql_view("strawberry.django.views").as_view(work=work),
    "graphene_django": csrf_exempt(a_graphql_view("graphene_django.views").as_view(work=work)),
    "ariadne_django": a_graphql_view("ariadne_django.views", HANDLER).as_view(),
    "tastypie": of("tastypie.resources", METHOD)["Resource"](work).dispatch_list,
}


@pytest.fixture(params=sorted(VIEWS))
def package(request: Any, settings: Any) -> str:
    """The package of a framework that serves ``/api/``, below the middleware."""
    settings.MIDDLEWARE = ways.MIDDLEWARE
    route = path("api/<int:version>/", VIEWS[request.param])
    settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [route]})
    return str(request.param)


def test_refused_at_run_time(package: str, client: Client, caplog: Any) -> None:
    """A request with a key is refused before anything is executed; the log has the way out."""
    assert_problem(post(client, "/api/1/", new_key()), 400, "key-unsupported")
    assert f"is a view of {package}" in caplog.text
    assert "list the paths that the middleware protects" in caplog.text
    assert effects() == 0


@pytest.mark.parametrize("package", ["strawberry", "graphene_django"])
def test_way_out(package: str) -> None:
    """The refusal names what protects the work."""
    with pytest.raises(ImproperlyConfigured, match=re.escape("idempotent_call()")):
        idempotent(VIEWS[package])
