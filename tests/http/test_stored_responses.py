"""Which responses are stored: none of the moment, no form with errors, what a policy says."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django import forms
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.generic import FormView
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.support.shared import assert_problem, assert_replays, effects, is_replay, new_key, record
from tests.support.ways import decorated

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

PAGE = "{{ form }} {{ formset }}"


class OrderForm(forms.Form):
    amount = forms.IntegerField()


OrderFormSet = forms.formset_factory(OrderForm)


def shown(request: HttpRequest, status: int = 200, **context: Any) -> HttpResponse:
    return TemplateResponse(request, engines["django"].from_string(PAGE), context, status=status)


class Order(FormView):
    form_class = OrderForm

    def form_valid(self, form: Any) -> HttpResponse:
        Effect.objects.create(reference="a")
        return HttpResponse(status=302, headers={"Location": "/done/"})

    def render_to_response(self, context: Any, **options: Any) -> HttpResponse:
        return shown(self.request, **context)


def order(request: HttpRequest, status: int = 200) -> HttpResponse:
    Effect.objects.create(reference="a")
    form = OrderForm(request.POST)
    return (
        HttpResponse("done", "text/plain") if form.is_valid() else shown(request, status, form=form)
    )


async def aorder(request: HttpRequest) -> HttpResponse:
    await Effect.objects.acreate(reference="a")
    form = OrderForm(request.POST)
    return HttpResponse("done", "text/plain") if form.is_valid() else shown(request, form=form)


def formset(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    found = OrderFormSet(
        {"form-TOTAL_FORMS": 1, "form-INITIAL_FORMS": 0, "form-0-amount": request.POST["amount"]}
    )
    return HttpResponse("done", "text/plain") if found.is_valid() else shown(request, formset=found)


def next_form(request: HttpRequest) -> HttpResponse:
    """A page of success, which shows an empty form for another order."""
    Effect.objects.create(reference="a")
    return shown(request, form=OrderForm(), formset=OrderFormSet())


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
    path("function/", protected(order)),
    path("unprocessable/", protected(lambda request: order(request, 422))),
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


@pytest.mark.parametrize(
    "url",
    "/class/ /function/ /unprocessable/ /async/ /formset/ /rendered/ /api/".split(),
)
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
def test_page(url: str, amount: str) -> None:
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


async def later(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    return response


def test_altered_by_a_coroutine_function() -> None:
    """A coroutine function is refused as ``on_replay`` where the policy is made."""
    with pytest.raises(ImproperlyConfigured, match="must be None or a plain function of a request"):
        Policy(on_replay=later)
