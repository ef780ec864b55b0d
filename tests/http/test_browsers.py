"""Browsers: keys in HTML forms."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template import Context, Template
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from idempotency_django.policy import keys
from tests.models import Effect
from tests.support.shared import assert_problem, effects, is_replay, new_key

TAG = "{% load idempotency %}{% idempotency_key %}"
FORM = Template(f"<form method='post'>{TAG}<input name='reference'></form>")


@idempotent(key=keys.form_field(), required=True)
def order(request: HttpRequest) -> HttpResponse:
    """A form that is shown, and sent."""
    if request.method == "GET":
        return HttpResponse(FORM.render(Context()))
    effect = Effect.objects.create(reference=request.POST["reference"])
    return HttpResponseRedirect(f"/orders/{effect.pk}/")


def plain(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference=request.POST["reference"])
    return HttpResponse(status=201)


urlpatterns = [
    path("order/", order),
    path("plain/", plain),
    path("decorated/", idempotent(plain)),
    path("reads/", idempotent(key=keys.form_field())(plain)),
    path("uuid/", idempotent(key=keys.form_field(), required=True, key_format="uuid")(plain)),
]


def hidden_in(page: str) -> dict[str, str]:
    """The hidden fields of a page."""
    found = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]+)"', page)
    return dict(found)


@pytest.mark.django_db(transaction=True)
@pytest.mark.urls(__name__)
class TestForms:
    """A form that carries its key in a hidden field."""

    def test_sent_twice(self, client: Client) -> None:
        """A form that is sent twice, by a double click or a reload, has one effect."""
        sent = {**hidden_in(client.get("/order/").content.decode()), "reference": "a"}
        first, again = client.post("/order/", sent), client.post("/order/", sent)
        assert first.status_code == again.status_code == 302
        assert first["Location"] == again["Location"]
        assert (is_replay(first), is_replay(again)) == (False, True)
        assert effects() == 1

    def test_beside_a_header_that_the_browser_made_up(self, alice: Client) -> None:
        """The form's own key counts, also where a key must have a format of the project's."""
        sent = {"idempotency_key": new_key(), "reference": "a"}
        first, again = (
            alice.post("/uuid/", sent, headers={"Idempotency-Key": f'"{made_up}"'})
            for made_up in ("17463529834658723465", "56432785643892536471")
        )
        assert (first.status_code, is_replay(again)) == (201, True)
        assert effects() == 1
        alone = alice.post(
            "/uuid/", {"reference": "a"}, headers={"Idempotency-Key": '"17463529834658723465"'}
        )
        assert_problem(alone, 400, "key-malformed")

    @pytest.mark.parametrize("value", ["", None])
    def test_missing(self, value: str | None) -> None:
        """A form without a key, or with an empty one, is refused where a key is required."""
        sent = {"reference": "a"} if value is None else {"reference": "a", "idempotency_key": value}
        response = Client().post("/order/", sent)
        assert_problem(response, 400, "key-missing")
        assert "Idempotency-Key or the field 'idempotency_key' of its form" in response.text
        assert effects() == 0

    def test_sent_as_json(self) -> None:
        """A field of that name in JSON is not a form's."""
        sent = {"idempotency_key": new_key(), "reference": "a"}
        response = Client().post("/order/", sent, content_type="application/json")
        assert_problem(response, 400, "key-missing")


@pytest.mark.django_db(transaction=True)
@pytest.mark.urls(__name__)
@pytest.mark.parametrize("where", ["plain", "decorated", "reads"])
def test_unread_field(
    where: str,
    settings: Any,
    caplog: pytest.LogCaptureFixture,
    unprotected: list[logging.LogRecord],
) -> None:
    """A form whose key no policy reads is not protected, and the log says what to do."""
    settings.MIDDLEWARE = [
        "django.middleware.csrf.CsrfViewMiddleware",
        "idempotency_django.middleware.IdempotencyMiddleware",
    ]
    client = Client(enforce_csrf_checks=True)
    client.cookies["csrftoken"] = "a" * 32
    sent = {"csrfmiddlewaretoken": "a" * 32, "reference": "a"}
    assert client.post(f"/{where}/", sent).status_code < 300
    assert "not protected" not in caplog.text
    assert client.post(f"/{where}/", {**sent, keys.FORM_FIELD: new_key()}).status_code < 300
    assert ("form_field()" in caplog.text) == (where != "reads")
    unprotected.clear()
