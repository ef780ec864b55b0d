"""The form of an answer: kept for whoever retries, and given only to those who accept it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth import login
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db import connections
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseRedirect,
    JsonResponse,
    StreamingHttpResponse,
)
from django.middleware.csrf import get_token
from django.template import Context, Template
from django.test import AsyncClient, Client
from django.urls import path
from django.utils import translation
from django.utils.translation import gettext
from django.views.decorators.csrf import ensure_csrf_cookie
from pytest_django.asserts import assertRedirects
from rest_framework import renderers, viewsets
from rest_framework.authentication import SessionAuthentication
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.http.status import describe_operation
from idempotency_django.stores.records import Payload, Record, Status
from tests.models import Effect
from tests.support import (
    EffectSerializer,
    assert_problem,
    assert_replays,
    effects,
    is_replay,
    new_key,
    post,
    record,
)

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
FORM = "application/x-www-form-urlencoded"


@idempotent
def page(request: HttpRequest) -> HttpResponse:
    """Answers with a page that has a form on it."""
    Effect.objects.create(reference="a")
    template = Template("<p>Thank you, Alice</p><form>{% csrf_token %}</form>")
    return HttpResponse(template.render(Context({"csrf_token": get_token(request)})))


@idempotent
async def async_page(request: HttpRequest) -> HttpResponse:
    """The same, async."""
    await Effect.objects.acreate(reference="a")
    return HttpResponse(f"<input value={get_token(request)}>")


@idempotent(should_store=lambda request, response: True)
def token_error(request: HttpRequest) -> HttpResponse:
    """Gives a token out, and fails."""
    get_token(request)
    raise PermissionDenied


@idempotent
def login_as_json(request: HttpRequest) -> HttpResponse:
    """Logs the caller in, which changes the token, and answers without it."""
    user = User.objects.create(username="ann")
    login(request, user)
    return JsonResponse({"id": user.pk}, status=201)


@idempotent
def login_and_redirect(request: HttpRequest) -> HttpResponse:
    """The same, with a redirect: HTML without content."""
    login(request, User.objects.create(username="ann"))
    return HttpResponseRedirect("/home/")


@idempotent
def token_as_json(request: HttpRequest) -> HttpResponse:
    """Answers with the token in a form, in JSON."""
    get_token(request)  # each call gives it out in another shape
    return JsonResponse({"form": f"<input>\n{get_token(request)}"})


@idempotent
def secret_as_text(request: HttpRequest) -> HttpResponse:
    """Answers with what the cookie holds."""
    get_token(request)
    return HttpResponse(f"token={request.META['CSRF_COOKIE']}", content_type="text/plain")


@idempotent
def token_as_stream(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse([get_token(request)], content_type="text/plain")


@ensure_csrf_cookie
@idempotent(should_store=lambda request, response: True)
def error_with_cookie(request: HttpRequest) -> HttpResponse:
    """Fails for everybody alike; the token is given out as a cookie."""
    raise PermissionDenied


@idempotent(rebuild=lambda record, request: HttpResponse("rebuilt"))
def rebuilt(request: HttpRequest) -> HttpResponse:
    """A page that can be made again."""
    return HttpResponse(f"<input value={get_token(request)}>")


@idempotent
def thanks(request: HttpRequest) -> HttpResponse:
    """Answers with a page without a form."""
    Effect.objects.create(reference="a")
    return HttpResponse("<p>Thank you</p>")


@ensure_csrf_cookie
@idempotent
def with_cookie(request: HttpRequest) -> HttpResponse:
    """Gives the token as a cookie, which is not stored."""
    return JsonResponse({"made": 1})


@idempotent
def scripted(request: HttpRequest) -> HttpResponse:
    """Answers with a page whose script has the nonce of this answer's policy."""
    Effect.objects.create(reference="a")
    template = Template('<script nonce="{{ csp_nonce }}">pay()</script>')
    return HttpResponse(template.render(Context({"csp_nonce": request._csp_nonce})))  # type: ignore[attr-defined]


@idempotent
def greeting(request: HttpRequest) -> HttpResponse:
    """Answers in the language of the request."""
    Effect.objects.create(reference="a")
    return HttpResponse(gettext("Yes"))


class Greeting(IdempotentViewMixin, APIView):
    """The same."""

    authentication_classes: ClassVar[list[Any]] = []

    def post(self, request: Request) -> Response:
        Effect.objects.create(reference="a")
        return Response(gettext("Yes"))


@idempotent
def in_french(request: HttpRequest) -> HttpResponse:
    """Says itself which language it has."""
    return HttpResponse("Oui", headers={"Content-Language": "fr"})


@idempotent
def unusual(request: HttpRequest) -> HttpResponse:
    """Answers with a status that Python does not know, and gives it a reason."""
    return HttpResponse("", status=298, reason="Nearly There")


class Redirecting(IdempotentViewMixin, APIView):
    """Answers with a redirect."""

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
    """Answers in the form that the request prefers."""
    Effect.objects.create(reference="a")
    if request.accepts("application/json"):
        return JsonResponse({"secret": "in JSON"})
    return HttpResponse("<p>secret in HTML</p>")


@idempotent
async def async_negotiating(request: HttpRequest) -> HttpResponse:
    """The same, async."""
    await Effect.objects.acreate(reference="a")
    return JsonResponse({"secret": "in JSON"})


@idempotent
def ignoring(request: HttpRequest) -> HttpResponse:
    """Answers in JSON, whatever the request accepts."""
    Effect.objects.create(reference="a")
    return JsonResponse({"made": 1})


@idempotent
def nothing(request: HttpRequest) -> HttpResponse:
    """Answers with nothing, in HTML."""
    return HttpResponse(b"", status=201)


class Browsable(IdempotentViewMixin, viewsets.ModelViewSet[Effect]):
    """Has pages, for the users who are logged in."""

    authentication_classes = [SessionAuthentication]
    permission_classes = [IsAuthenticated]
    renderer_classes = [renderers.JSONRenderer, renderers.BrowsableAPIRenderer]
    queryset = Effect.objects.all()
    serializer_class = EffectSerializer


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
    path("scripted/", scripted),
    path("greeting/", greeting),
    path("greeting-drf/", Greeting.as_view()),
    path("in-french/", in_french),
    path("unusual/", unusual),
    path("redirect/", redirecting),
    path("redirect-drf/", Redirecting.as_view()),
    path("page/", page),
    path("async-page/", async_page),
    path("token-error/", token_error),
    path("login/", login_as_json),
    path("login-redirect/", login_and_redirect),
    path("token-json/", token_as_json),
    path("secret-text/", secret_as_text),
    path("token-stream/", token_as_stream),
    path("error-with-cookie/", error_with_cookie),
    path("rebuilt/", rebuilt),
    path("thanks/", thanks),
    path("with-cookie/", with_cookie),
    path("negotiating/", negotiating),
    path("async-negotiating/", async_negotiating),
    path("ignoring/", ignoring),
    path("nothing/", nothing),
    path("browsable/", Browsable.as_view({"post": "create"})),
    path("pages/", PagesOnly.as_view()),
    path("template/", TokenPage.as_view()),
]


@pytest.mark.parametrize("url", ["/page/", "/async-page/", "/pages/", "/template/"])
def test_page_for_one_visitor(url: str, client: Client) -> None:
    """A page that holds a visitor's CSRF token is not kept; the retry is not executed."""
    key = new_key()
    first = post(client, url, key)
    assert first.status_code == 200
    assert_problem(post(client, url, key), 409, "response-not-stored")
    assert effects() == 1
    assert record(key).response_body is None


def test_page_that_can_be_rebuilt(client: Client) -> None:
    """Such a page is made again where the policy knows how."""
    key = new_key()
    post(client, "/rebuilt/", key)
    again = post(client, "/rebuilt/", key)
    assert is_replay(again)
    assert again.content == b"rebuilt"


def test_error_page_for_one_visitor(client: Client) -> None:
    """The page of an error that was raised, likewise."""
    key = new_key()
    assert post(client, "/token-error/", key).status_code == 403
    stored = record(key)
    assert (stored.response_status, stored.response_body) == (403, None)


def test_error_page_for_everybody(client: Client) -> None:
    """A token that was given out before the view ran is not in the page of its error."""
    key = new_key()
    first = post(client, "/error-with-cookie/", key)
    assert (first.status_code, bool(first.content)) == (403, True)
    assert first.cookies["csrftoken"].value
    assert_replays(first, post(client, "/error-with-cookie/", key))


@pytest.mark.parametrize("url", ["/login/", "/login-redirect/"])
def test_login(url: str, client: Client) -> None:
    """A login changes the token; an answer that does not show it is kept."""
    key = new_key()
    first, again = post(client, url, key), post(Client(), url, key)
    assert first.status_code in (201, 302)
    assert_replays(first, again)
    assert User.objects.count() == 1


@pytest.mark.parametrize("url", ["/token-json/", "/secret-text/", "/token-stream/"])
def test_token_in_another_form(url: str, client: Client) -> None:
    """What holds the token is not kept, whatever its form."""
    key = new_key()
    assert post(client, url, key).status_code == 200
    assert_problem(post(client, url, key), 409, "response-not-stored")


def test_page_with_a_nonce(settings: Any, client: Client) -> None:
    """A page's scripts run under the policy of one answer only, so the page is not kept."""
    csp = pytest.importorskip("django.utils.csp", reason="DJANGO 6")
    settings.SECURE_CSP = {"script-src": [csp.CSP.NONCE]}
    at = "django.middleware.csp.ContentSecurityPolicyMiddleware"
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, at]
    key = new_key()
    first = post(client, "/scripted/", key)
    nonce = first["Content-Security-Policy"].partition("'nonce-")[2].rstrip("'")
    assert nonce
    assert f'nonce="{nonce}"' in first.content.decode()
    assert_problem(post(client, "/scripted/", key), 409, "response-not-stored")
    assert effects() == 1
    key = new_key()  # a page without one, whose policy is each answer's own
    assert_replays_but(
        "Content-Security-Policy", post(client, "/thanks/", key), post(client, "/thanks/", key)
    )


@pytest.mark.parametrize("nonce", ["aB3+/w==", ""])
def test_page_with_a_nonce_of_django_csp(nonce: str, client: Client) -> None:
    """The same with django-csp, which notes its nonce in the same place, as a text."""

    def with_nonce(get_response: Any) -> Any:
        def middleware(request: Any) -> Any:
            request._csp_nonce = nonce
            return get_response(request)

        return middleware

    client.handler.load_middleware()
    client.handler._middleware_chain = with_nonce(client.handler._middleware_chain)
    key = new_key()
    first = post(client, "/scripted/", key)
    assert nonce in first.content.decode()
    second = post(client, "/scripted/", key)
    if nonce:
        assert_problem(second, 409, "response-not-stored")
    else:
        assert_replays(first, second)
    assert effects() == 1


def assert_replays_but(header: str, first: Any, second: Any) -> None:
    """It is a replay, but for one header."""
    assert is_replay(second)
    assert second.content == first.content
    del first[header], second[header]
    assert_replays(first, second)


@pytest.fixture
def own_language() -> Iterator[None]:
    """The language that a request has chosen is not that of the next test."""
    with translation.override(translation.get_language()):
        yield


@pytest.mark.usefixtures("own_language")
@pytest.mark.parametrize("url", ["/greeting/", "/greeting-drf/"])
def test_language(url: str, settings: Any, client: Client) -> None:
    """An answer keeps the label of its own language, whichever one the retry asks for."""
    locale = "django.middleware.locale.LocaleMiddleware"
    settings.USE_I18N = True
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, locale]
    key = new_key()
    german, english = ({"Accept-Language": each} for each in ("de", "en"))
    first = post(client, url, key, headers=german)
    assert (first["Content-Language"], b"Ja" in first.content) == ("de", True)
    assert_replays(first, post(client, url, key, headers=english))
    key = new_key()
    first = post(client, "/in-french/", key, headers=german)
    assert first["Content-Language"] == "fr"
    assert_replays(first, post(client, "/in-french/", key, headers=english))


def test_language_of_nobody(client: Client) -> None:
    """Where no middleware says which language it is, a replay does not say so either."""
    key = new_key()
    first = post(client, "/greeting/", key)
    assert not first.has_header("Content-Language")
    assert_replays(first, post(client, "/greeting/", key))


def test_reason(client: Client) -> None:
    """A reason phrase of the view's own is replayed, also of a status that Python does not know."""
    key = new_key()
    first, second = (post(client, "/unusual/", key) for _ in "ab")
    assert first.reason_phrase == second.reason_phrase == "Nearly There"
    assert_replays(first, second)


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


def test_page_for_everybody(client: Client) -> None:
    """A page without a token is kept."""
    key = new_key()
    assert_replays(post(client, "/thanks/", key), post(client, "/thanks/", key))


@pytest.mark.parametrize("cookie", [None, "bad"])
def test_token_in_a_cookie_only(client: Client, cookie: str | None) -> None:
    """A token that was given out before the view ran is not in its answer."""
    if cookie:  # which Django replaces, and notes that it did
        client.cookies["csrftoken"] = cookie
    key = new_key()
    first = post(client, "/with-cookie/", key)
    assert first.cookies["csrftoken"].value
    assert_replays(first, post(client, "/with-cookie/", key))
    key = new_key()
    assert_replays(post(client, "/ignoring/", key), post(client, "/ignoring/", key))


@pytest.fixture
def alice(client: Client) -> Client:
    client.force_login(User.objects.create_user("alice"))
    return client


def test_browsable_api(alice: Client) -> None:
    """Of a page of the browsable API the data are kept; a retry gets them in its own form."""
    key = new_key()
    shown = post(alice, "/browsable/", key, headers={"Accept": BROWSER})
    assert shown.status_code == 201
    assert b"csrfToken" in shown.content
    made = Effect.objects.get()
    stored = bytes(record(key).response_body)
    assert json.loads(stored) == {"id": made.pk, "reference": "a"}
    for accept in ("application/json", "*/*", "application/json; indent=4"):
        again = post(alice, "/browsable/", key, headers={"Accept": accept})
        assert is_replay(again)
        assert (again.status_code, again["Content-Type"]) == (201, "application/json")
        assert again.content == stored
    User.objects.update(username="ann")
    page = post(alice, "/browsable/", key, headers={"Accept": BROWSER})
    assert is_replay(page)
    assert (page.status_code, page["Content-Type"]) == (201, "text/html; charset=utf-8")
    assert b"ann" in page.content
    assert b"alice" not in page.content
    assert effects() == 1


def test_page_of_a_json_answer(alice: Client) -> None:
    """An answer in JSON is shown to a browser as any other answer of the view."""
    key = new_key()
    first = post(alice, "/browsable/", key, headers={"Accept": "application/json"})
    page = post(alice, "/browsable/", key, headers={"Accept": "text/html"})
    assert is_replay(page)
    assert page["Content-Type"] == "text/html; charset=utf-8"
    assert page.data == first.json()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("application/json", "text/html"),
        ("text/html", "application/json"),
        ("*/*", "text/html, application/xml;q=0.9"),
        ("*/*", "application/json;q=0, text/html"),
    ],
)
def test_another_form(client: Client, first: str, second: str, sent: list[str]) -> None:
    """A retry that does not accept the form of the stored answer is told so, and no more."""
    key = new_key()
    post(client, "/negotiating/", key, headers={"Accept": first})
    refused = post(client, "/negotiating/", key, headers={"Accept": second})
    assert_problem(refused, 406, "not-acceptable")
    assert b"secret" not in refused.content
    assert not is_replay(refused)
    assert "replayed" not in sent
    assert record(key).replay_count == 0
    assert effects() == 1
    again = post(client, "/negotiating/", key, headers={"Accept": first})
    assert is_replay(again)


@pytest.mark.parametrize("accept", [None, "*/*", "application/*", BROWSER, "application/json;v=2"])
def test_same_form(client: Client, accept: str | None) -> None:
    """A retry that accepts the form gets the replay."""
    key = new_key()
    first = post(client, "/negotiating/", key, headers={"Accept": "application/json"})
    headers = {"Accept": accept} if accept else {}
    assert_replays(first, post(client, "/negotiating/", key, headers=headers))


@pytest.mark.parametrize("accept", ["text/html", "application/vnd.own+json", "nonsense"])
def test_view_that_ignores_accept(client: Client, accept: str) -> None:
    """Where the first answer did not heed Accept, no replay does: the same retry gets it."""
    key = new_key()
    first = post(client, "/ignoring/", key, headers={"Accept": accept})
    assert_replays(first, post(client, "/ignoring/", key, headers={"Accept": accept}))
    assert ":accept" not in first.headers
    assert effects() == 1


def test_nothing_has_no_form(client: Client) -> None:
    """An answer without a body suits everybody."""
    key = new_key()
    first = post(client, "/nothing/", key)
    assert_replays(first, post(client, "/nothing/", key, headers={"Accept": "application/json"}))


def test_status_view_shows_no_notes() -> None:
    """What is noted with a stored answer is not shown with its headers."""
    payload = Payload(200, (("Content-Type", "text/csv"), (":accept", "*/*")), b"a")
    shown = describe_operation(Record(key="k", scope="s", status=Status.COMPLETED, payload=payload))
    assert shown["response"]["headers"] == [["Content-Type", "text/csv"]]


@pytest.mark.django_db(transaction=True)
def test_another_form_on_event_loop(sent: list[str]) -> None:
    """Async views and ASGI likewise."""

    async def twice() -> tuple[Any, Any]:
        client, key = AsyncClient(), new_key()
        try:
            return (
                await client.post("/async-negotiating/", headers={"Idempotency-Key": key}),
                await client.post(
                    "/async-negotiating/", headers={"Idempotency-Key": key, "Accept": "text/html"}
                ),
            )
        finally:
            await sync_to_async(connections.close_all)()

    first, refused = asyncio.run(twice())
    assert first.status_code == 200
    assert_problem(refused, 406, "not-acceptable")
    assert sent == ["claimed", "completed"]
    assert effects() == 1
