"""``@idempotent`` and ``@idempotency_exempt`` on Django's own views."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import Client
from django.urls import path
from django.utils.decorators import method_decorator
from django.views.decorators.cache import cache_control
from django.views.generic import TemplateView, View

from idempotency_django import IdempotentRequest
from idempotency_django.decorators import idempotency_exempt, idempotent
from idempotency_django.http.declared import policy_of
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import PAYMENT, UNSET, Policy, keys, store_errors
from tests.models import Effect
from tests.support.shared import assert_problem, assert_replays, effects, is_replay, new_key, post
from tests.support.views import create

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

no_store = cache_control(no_store=True)  # its header says the same at any time


@idempotent
def plain(request: HttpRequest) -> HttpResponse:
    return create(request)


@idempotent(policy=PAYMENT, mode="transactional", should_store=store_errors)
def payment(request: HttpRequest) -> HttpResponse:
    return create(request)


@idempotent(policy=PAYMENT)
def pay(request: IdempotentRequest) -> HttpResponse:
    charged = request.idempotency.step("charge", lambda: Effect.objects.create(reference="a").pk)
    return JsonResponse({"id": charged}, status=201)


@idempotent
def returns_nothing(request: HttpRequest) -> HttpResponse:
    create(request)
    return None  # type: ignore[return-value]


@idempotent
def template(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="template")
    page = engines["django"].from_string("n={{ n }}")
    return TemplateResponse(request, page, {"n": 1}, "text/plain")


@idempotent(key=keys.natural("reference"))
def natural(request: HttpRequest) -> HttpResponse:
    return create(request)


class OnHandlerDirectly(View):
    @idempotent(required=True)
    def post(self, request: HttpRequest) -> HttpResponse:
        return create(request)


class OnDecorated(View):
    @method_decorator(no_store)
    @idempotent
    def post(self, request: HttpRequest) -> HttpResponse:
        return create(request)


class Simple(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return create(request)


@idempotent
def outer(request: HttpRequest) -> HttpResponse:
    assert request.idempotency is not None
    return OnHandlerDirectly.as_view()(request)


urlpatterns = [
    path("plain/", plain),
    path("payment/", payment),
    path("pay/", pay),
    path("nothing/", returns_nothing),
    path("template/", template),
    path("natural/", natural),
    path("decorated-handler/", OnDecorated.as_view()),
    path("outer/", outer),
]


class TestKinds:
    """Every kind of view."""

    @pytest.mark.parametrize(
        "url",
        ["/payment/", "/decorated-handler/", "/outer/"],
    )
    def test_replay(self, alice: Client, url: str) -> None:
        """One effect; each retry is the first response again; one record, whatever is nested."""
        key = new_key()
        first = post(alice, url, key)
        assert first.status_code == 201
        assert_replays(first, post(alice, url, key))
        assert_problem(post(alice, url, key, "b"), 422, "mismatch")
        assert (effects(), effects("b")) == (1, 0)
        assert IdempotencyKey.objects.count() == 1

    def test_derived_key_that_is_missing(self, client: Client) -> None:
        """Without the field that is its key a request runs unprotected, unless one is required."""
        assert post(client, "/natural/", None, "").status_code == 201
        assert post(client, "/natural/", None, "").status_code == 201
        assert effects("") == 2

    def test_payment(self, client: Client) -> None:
        """``PAYMENT`` has steps, needs a key, and suits a client that retries for weeks."""
        key = new_key()
        assert_problem(post(client, "/pay/"), 400, "key-missing")
        first = post(client, "/pay/", key)
        assert first.status_code == 201
        assert_replays(first, post(client, "/pay/", key))
        assert effects() == 1
        assert int(first["Idempotency-Status"].partition("ttl=")[2]) > 29 * 86400

    def test_template_is_rendered_inside(self, client: Client) -> None:
        """A template's response is rendered before it is stored."""
        key = new_key()
        first = post(client, "/template/", key)
        assert first.content == b"n=1"
        assert_replays(first, post(client, "/template/", key))

    def test_safe_method(self, client: Client) -> None:
        """A safe method is just run, and learns that there is no claim."""
        key = new_key()
        with pytest.raises(json.JSONDecodeError):
            client.get("/plain/", headers={"Idempotency-Key": key})
        assert not IdempotencyKey.objects.exists()


def test_no_response(client: Client) -> None:
    """A view that returns no response is told so, and nothing stays."""
    with pytest.raises(TypeError, match="returned NoneType, not an HttpResponse"):
        post(client, "/nothing/", new_key())
    assert effects() == 0


class TestMisuse:
    """What cannot be protected is refused when it is defined, and says what to do."""

    def test_no_view(self) -> None:
        """A class: the method that does the work is to be decorated."""
        with pytest.raises(ImproperlyConfigured, match="directly above the method that does"):
            idempotent(dict)

    def test_twice(self) -> None:
        """A second policy, which would not count, is refused."""
        with pytest.raises(ImproperlyConfigured, match="protected already"):
            idempotent(required=True, ttl=None)(plain)


def test_exempt() -> None:
    """``@idempotency_exempt`` is for functions and classes, and what is made of them."""

    @no_store
    @idempotency_exempt
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    @idempotency_exempt
    class Exempt(TemplateView):
        pass

    assert policy_of(view) is None
    assert policy_of(Exempt.as_view()) is None
    assert policy_of(type("Sub", (Exempt,), {}).as_view()) is None
    assert policy_of(Simple.as_view()) is UNSET
    with pytest.raises(ImproperlyConfigured, match="both protected and exempt"):
        idempotency_exempt(plain)


class Charges(View):
    idempotency_policies: ClassVar[Any] = {"put": None, "patch": Policy(required=True)}

    def post(self, request: HttpRequest) -> HttpResponse:
        return create(request)

    put = patch = post


def test_policies_by_method(alice: Client, settings: Any) -> None:
    """A class-based view declares policies by method, for the middleware."""
    ours = "idempotency_django.middleware.IdempotencyMiddleware"
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, ours]
    settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("x/", Charges.as_view())]})
    replays = {}
    for method in ("post", "put"):
        key = new_key()
        sent = [post(alice, "/x/", key, method, method=method) for _ in range(2)]
        replays[method] = is_replay(sent[1])
    assert replays == {"post": True, "put": False}
    assert_problem(post(alice, "/x/", None, method="patch"), 400, "key-missing")
