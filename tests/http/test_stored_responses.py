"""Which responses are stored, and in which form: no form with errors, no page."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django import forms
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.middleware.csrf import get_token
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.generic import FormView
from pytest_django.asserts import assertRedirects
from rest_framework import renderers
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.support.shared import (
    assert_problem,
    assert_replays,
    effects,
    is_replay,
    new_key,
    post,
    record,
)
from tests.support.ways import decorated

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

PAGE = "{{ form }} {{ formset }}"


class OrderForm(forms.Form):
    amount = forms.IntegerField()


def shown(request: HttpRequest, **context: Any) -> HttpResponse:
    return TemplateResponse(request, engines["django"].from_string(PAGE), context)


class Order(FormView):
    form_class = OrderForm

    def form_valid(self, form: Any) -> HttpResponse:
        Effect.objects.create(reference="a")
        return HttpResponse(status=302, headers={"Location": "/done/"})

    def render_to_response(self, context: Any, **options: Any) -> HttpResponse:
        return shown(self.request, **context)


def order(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    form = OrderForm(request.POST)
    return HttpResponse("done", "text/plain") if form.is_valid() else shown(request, form=form)


async def aorder(request: HttpRequest) -> HttpResponse:
    return await sync_to_async(order)(request)


def formset(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    sent = {"form-TOTAL_FORMS": 1, "form-INITIAL_FORMS": 0, "form-0-amount": request.POST["amount"]}
    found = forms.formset_factory(OrderForm)(sent)
    return HttpResponse("done", "text/plain") if found.is_valid() else shown(request, formset=found)


def next_form(request: HttpRequest) -> HttpResponse:
    """A page of success, which shows an empty form for another order."""
    Effect.objects.create(reference="a")
    return shown(request, form=OrderForm())


def by_header(request: HttpRequest, response: HttpResponse) -> bool:
    return "X-Errors" not in response


def rendered(request: HttpRequest) -> HttpResponse:
    """What ``render()`` makes: nobody can know that it is a form with errors."""
    Effect.objects.create(reference="a")
    if OrderForm(request.POST).is_valid():
        return HttpResponse("done", "text/plain")
    return HttpResponse("errors", "text/plain", headers={"X-Errors": "1"})


class Api(IdempotentViewMixin, APIView):
    idempotency_policy = Policy(
        should_store=lambda request, response: "errors" not in response.data,
    )

    def post(self, request: Request) -> Response:
        Effect.objects.create(reference="a")
        amount = request.data["amount"]
        if amount == "raise":
            raise ValidationError({"errors": ["amount"]})
        if amount == "kept":
            raise ValidationError({"detail": "no"})
        return Response({"done": 1} if amount.isdigit() else {"errors": ["amount"]})


def protected(view: Any, **fields: Any) -> Any:
    return csrf_exempt(idempotent(**fields)(view) if fields else idempotent(view))


urlpatterns = [
    path("class/", csrf_exempt(decorated(Order).as_view())),
    path("async/", protected(aorder)),
    path("formset/", protected(formset)),
    path("next/", protected(next_form)),
    path("stored/", protected(order, should_store=lambda request, response: True)),
    path("rendered/", protected(rendered, should_store=by_header)),
    path("altered/", protected(rendered, on_replay=lambda request, response: None)),
    path("api/", Api.as_view()),
]


def send(url: str, key: str, amount: str) -> HttpResponse:
    client = Client()
    if url != "/async/":
        return client.post(url, {"amount": amount}, headers={"Idempotency-Key": key})

    async def go() -> HttpResponse:
        data, headers = {"amount": amount}, {"Idempotency-Key": key}
        return await AsyncClient().post(url, data, headers=headers)

    return async_to_sync(go)()


@pytest.mark.parametrize("url", ["/class/", "/async/", "/formset/", "/rendered/", "/api/"])
def test_corrected_form(url: str) -> None:
    """A form with errors is not the response of its key: the corrected form runs under it, once."""
    key = new_key()
    refused = send(url, key, "many")
    assert b"amount" in refused.content or b"errors" in refused.content
    assert record(key).status == "failed"
    assert "form with errors" in record(key).error or "should_store=" in record(key).error
    first = send(url, key, "5")
    assert not is_replay(first)
    assert_replays(first, send(url, key, "5"))
    assert effects() == (2 if url == "/async/" else 1)  # whose view rolls nothing back


@pytest.mark.parametrize(("url", "amount"), [("/next/", "5"), ("/stored/", "many")])
def test_page_with_a_form(url: str, amount: str) -> None:
    """A form that is empty is a page like others; so is one with errors, if the policy says so."""
    key = new_key()
    assert send(url, key, amount).status_code == 200
    assert_problem(send(url, key, amount), 409, "response-not-stored")
    assert effects() == 1


def test_raised_error_that_the_policy_stores() -> None:
    """``should_store`` has a say in what was raised, too."""
    for amount, kept in (("raise", False), ("kept", True)):
        key = new_key()
        first, second = send("/api/", key, amount), send("/api/", key, amount)
        assert (first.status_code, second.status_code) == (400, 400)
        assert is_replay(second) is kept
    assert effects() == 0


def test_altered_by_nothing() -> None:
    """An ``on_replay`` that returns no response is an error that says so."""
    key = new_key()
    assert send("/altered/", key, "5").status_code == 200
    with pytest.raises(TypeError, match="its policy, returned NoneType, not an HttpResponse"):
        send("/altered/", key, "5")
    assert effects() == 1


# The form of what is stored.


@idempotent
def page(request: HttpRequest) -> HttpResponse:
    """Responds with a page that has a form on it."""
    Effect.objects.create(reference="a")
    return HttpResponse(f"<p>Thank you, Alice</p><form><input value={get_token(request)}></form>")


class Redirecting(IdempotentViewMixin, APIView):
    authentication_classes: ClassVar[list[Any]] = []

    def post(self, request: Request) -> HttpResponse:
        Effect.objects.create(reference="a")
        return HttpResponseRedirect("/home/")


@idempotent
def redirecting(request: HttpRequest) -> HttpResponse:
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


urlpatterns += [
    path("redirect/", redirecting),
    path("redirect-drf/", Redirecting.as_view()),
    path("page/", page),
    path("negotiating/", negotiating),
    path("pages/", PagesOnly.as_view()),
]


@pytest.mark.parametrize("url", ["/page/", "/pages/"])
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
