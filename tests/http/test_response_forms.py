"""The form of a response: pages are not stored, and every other response is replayed as it is."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseRedirect,
    JsonResponse,
)
from django.middleware.csrf import get_token
from django.template import Context, Template
from django.test import Client
from django.urls import path
from pytest_django.asserts import assertRedirects
from rest_framework import renderers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.http.responses import NEVER_STORED_HEADERS, payload_of, response_of
from idempotency_django.policy import DEFAULTS, Policy
from tests.models import Effect
from tests.support.shared import (
    assert_problem,
    assert_replays,
    effects,
    new_key,
    post,
    record,
)

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]


@idempotent
def page(request: HttpRequest) -> HttpResponse:
    """Responds with a page that has a form on it."""
    Effect.objects.create(reference="a")
    template = Template("<p>Thank you, Alice</p><form>{% csrf_token %}</form>")
    return HttpResponse(template.render(Context({"csrf_token": get_token(request)})))


@idempotent
async def async_page(request: HttpRequest) -> HttpResponse:
    """The same, async."""
    await Effect.objects.acreate(reference="a")
    return HttpResponse(f"<input value={get_token(request)}>")


@idempotent
def thanks(request: HttpRequest) -> HttpResponse:
    """Responds with a page without a form."""
    Effect.objects.create(reference="a")
    return HttpResponse("<p>Thank you</p>")


class Redirecting(IdempotentViewMixin, APIView):
    """Responds with a redirect."""

    authentication_classes: ClassVar[list[Any]] = []

    def post(self, request: Request) -> HttpResponse:
        Effect.objects.create(reference="a")
        return HttpResponseRedirect("/home/")


@idempotent
def redirecting(request: HttpRequest) -> HttpResponse:
    """The same."""
    Effect.objects.create(reference="a")
    return HttpResponseRedirect("/home/")


@idempotent
def negotiating(request: HttpRequest) -> HttpResponse:
    """Responds in the form that the request prefers."""
    Effect.objects.create(reference="a")
    if request.accepts("application/json"):
        return JsonResponse({"made": 1})
    return HttpResponse("made,1", content_type="text/csv")


class PagesOnly(IdempotentViewMixin, APIView):
    """Has nothing but pages."""

    authentication_classes: ClassVar[list[Any]] = []
    renderer_classes = [renderers.BrowsableAPIRenderer]

    def post(self, request: Request) -> Response:
        Effect.objects.create(reference="a")
        return Response({"made": 1})


class TokenPage(PagesOnly):
    """Renders a template of its own, with a form."""

    renderer_classes = [renderers.StaticHTMLRenderer]

    def post(self, request: Request) -> Response:
        Effect.objects.create(reference="a")
        return Response(f"<input value={get_token(request._request)}>")


urlpatterns = [
    path("redirect/", redirecting),
    path("redirect-drf/", Redirecting.as_view()),
    path("page/", page),
    path("async-page/", async_page),
    path("thanks/", thanks),
    path("negotiating/", negotiating),
    path("pages/", PagesOnly.as_view()),
    path("template/", TokenPage.as_view()),
]


@pytest.mark.parametrize("url", ["/page/", "/async-page/", "/pages/", "/template/", "/thanks/"])
def test_page(url: str, client: Client) -> None:
    """A page may show its visitor's name and tokens: it is not stored, and not executed again."""
    key = new_key()
    first = post(client, url, key)
    assert first.status_code == 200
    assert first["Idempotency-Status"] == "executed; stored=?0"
    assert_problem(post(client, url, key), 409, "response-not-stored")
    assert effects() == 1
    stored = record(key)
    assert (stored.response_status, stored.response_body) == (200, None)


@pytest.mark.parametrize("url", ["/redirect/", "/redirect-drf/"])
def test_redirect(url: str, client: Client) -> None:
    """A replayed redirect can be followed, and asserted, by Django's test client."""
    headers = {"Idempotency-Key": new_key()}
    first, second = (client.post(url, {}, headers=headers) for _ in "ab")
    assert_replays(first, second)
    for response in (first, second):
        assertRedirects(response, "/home/", fetch_redirect_response=False)
    followed = client.post(url, {}, headers=headers, follow=True)
    assert followed.redirect_chain == [("/home/", 302)]
    assert effects() == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("application/json", "text/csv"),
        ("text/csv", "application/json"),
        ("*/*", "text/html, application/xml;q=0.9"),
        ("application/json", None),
    ],
)
def test_media_type(client: Client, first: str, second: str | None) -> None:
    """A replay keeps the media type of its first response, whatever the retry accepts."""
    key = new_key()
    sent = post(client, "/negotiating/", key, headers={"Accept": first})
    headers = {"Accept": second} if second else {}
    assert_replays(sent, post(client, "/negotiating/", key, headers=headers))
    assert effects() == 1


@pytest.mark.parametrize("name", sorted(NEVER_STORED_HEADERS))
def test_never_kept(name: str) -> None:
    """Headers of one message, connection or session are not stored, in any case."""
    first = HttpResponse(b"a", "text/plain")
    first[name.title()] = "1"
    assert name not in response_of(payload_of(first, Policy().over(DEFAULTS)))
