"""Refusals, in both dialects: what became of the operation, and what may be sent again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import Client, override_settings
from django.urls import path

from idempotency_django import errors
from idempotency_django.contrib.concurrency.errors import ConcurrentModification
from idempotency_django.contrib.messaging.errors import (
    DeliveryMalformed,
    SignatureRefused,
    UnknownEventType,
)
from idempotency_django.decorators import idempotent
from idempotency_django.errors import KeyGuessable, KeyRefused, StoreUnavailable, all_errors
from idempotency_django.http.responses import error_body, problem_response, status_of
from idempotency_django.policy import scopes
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import Record, Status
from tests.models import Effect
from tests.support.shared import assert_problem, effects, logged_in, new_key, post
from tests.support.views import Mixed, create

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


def change(request: HttpRequest) -> HttpResponse:
    """Have an effect, then find that its object has changed."""
    Effect.objects.create(reference="a")
    raise ConcurrentModification


urlpatterns = [
    path("transactional/", idempotent(mode="transactional", operation="change")(change)),
    path("leased/", idempotent(mode="leased", operation="change")(change)),
]


def test_only_refused_keys_are_replaced() -> None:
    """Without knowing more, a new key is safe only where nothing was looked up or executed."""
    safe = {error for error in all_errors() if error.safe_new_key}
    refused = {*all_errors(KeyRefused)} - {KeyGuessable}
    messages = {UnknownEventType, SignatureRefused, DeliveryMalformed}
    assert safe == refused | messages
    assert all(error.state == "not-executed" for error in all_errors() if error.safe_new_key)


@pytest.mark.parametrize(
    ("where", "state", "left"), [("/transactional/", "not-executed", 0), ("/leased/", "unknown", 1)]
)
def test_view_that_began(client: Client, where: str, state: str, left: int) -> None:
    """The first attempt in a transaction that rolls back leaves nothing in the database; what a
    leased one did before its error is not known. Nor is what either has done elsewhere, so a new
    key is not safe.
    """
    problem = assert_problem(post(client, where, new_key()), 409, "state-conflict")
    assert (problem["state"], problem["safe_new_key"], problem["retryable"]) == (state, False, True)
    assert effects() == left


@pytest.mark.parametrize("where", ["/transactional/", "/leased/"])
def test_store_out_of_reach(client: Client, where: str) -> None:
    """Who cannot look up the key does not know whether an earlier request had its effect."""
    with mock.patch.object(DatabaseStore, "acquire", side_effect=StoreUnavailable):
        problem = assert_problem(post(client, where, new_key()), 503, "store-unavailable")
    told = ("unknown", False, True)
    assert (problem["state"], problem["safe_new_key"], problem["retryable"]) == told


# How an error is shown.


@pytest.mark.parametrize("error_class", sorted(all_errors(), key=str))
def test_problem(error_class: type[errors.IdempotencyError]) -> None:
    """An error is a problem (RFC 9457) whose type is the address of its explanation."""
    response = problem_response(error_class("What was wrong: é."))
    assert response.status_code == error_class.status
    assert response["Content-Type"] == "application/problem+json"
    assert "Retry-After" not in response
    assert json.loads(response.content) == {
        "type": f"https://idempotency-django.readthedocs.io/problems/#{error_class.slug}",
        "title": error_class.title,
        "status": error_class.status,
        "detail": "What was wrong: é.",
        "code": error_class.slug,
        "state": error_class.state,
        "retryable": error_class.retryable,
        "safe_new_key": error_class.safe_new_key,
    }


@pytest.mark.parametrize("seconds", [0, 30])
def test_retry_after(seconds: int) -> None:
    """A problem that passes says when to come again."""
    response = problem_response(errors.OperationInProgress(retry_after=seconds))
    assert response["Retry-After"] == str(seconds)


@override_settings(
    IDEMPOTENCY={"STATUS_CODES": {"mismatch": 409}, "DOCS_URL": "https://docs.example.com/#"}
)
def test_status_codes_and_docs_are_settings() -> None:
    """A project chooses the status by the slug, and where problems are explained."""
    problem = error_body(errors.FingerprintMismatch())
    assert (problem["status"], problem["type"]) == (409, "https://docs.example.com/#mismatch")
    assert problem_response(errors.FingerprintMismatch()).status_code == 409
    assert status_of(errors.KeyMissing()) == 400


# Both dialects of HTTP, on views of Django and of REST framework.


PROBLEM, JSON = "application/problem+json", "application/json"
SPOKEN: dict[str, dict[str, tuple[int, str, str]]] = {
    "ietf": {
        "mismatch": (422, PROBLEM, "mismatch"),
        "in progress": (409, PROBLEM, "in-progress"),
        "malformed": (400, PROBLEM, "key-malformed"),
        "missing": (400, PROBLEM, "key-missing"),
    },
    "stripe": {
        "mismatch": (400, JSON, "idempotency_error"),
        "in progress": (409, JSON, "idempotency_error"),
        "malformed": (400, JSON, "idempotency_error"),
        "missing": (400, JSON, "idempotency_error"),
    },
}
"""The status and the media type of each refusal, and what tells it from others."""

of_caller = idempotent(scope=scopes.per_caller)(create)
urlpatterns += [
    path("decorator/", idempotent(create)),
    path("mixin/", Mixed.as_view()),
    *(path(f"of-caller/{each}/", of_caller) for each in (1, 2)),
]


@pytest.fixture(params=SPOKEN)
def dialect(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each dialect, while it is the project's."""
    with override_settings(IDEMPOTENCY={"DIALECT": request.param}):
        yield request.param


def told(response: Any) -> tuple[int, str, str]:
    """What an error says, in whichever dialect."""
    body = response.json()
    name = body["error"]["type"] if "error" in body else body["type"].rpartition("#")[2]
    return response.status_code, response["Content-Type"].partition(";")[0], name


@pytest.mark.parametrize("url", ["/decorator/", "/mixin/"])
def test_dialects(client: Client, dialect: str, url: str) -> None:
    """Each kind of refusal is in the words of the project's dialect, and executes nothing."""
    key = new_key()
    post(client, url, key)
    mismatch = post(client, url, key, "b")
    under_way = Record(key="", scope="", status=Status.IN_PROGRESS)
    with mock.patch.object(DatabaseStore, "acquire", return_value=under_way):
        in_progress = post(client, url, new_key())
    required = {"DIALECT": dialect, "POLICY": {"required": True}}
    with override_settings(IDEMPOTENCY=required):
        missing = post(client, url)
    assert {
        "mismatch": told(mismatch),
        "in progress": told(in_progress),
        "malformed": told(post(client, url, "k" * 256)),
        "missing": told(missing),
    } == SPOKEN[dialect]
    assert in_progress["Retry-After"] == "1"
    hint = "false" if dialect == "stripe" else None
    assert mismatch.headers.get("Stripe-Should-Retry") == hint
    assert (effects(), effects("b")) == (1, 0)


def test_every_error(dialect: str) -> None:
    """Each dialect has a body for each error."""
    for error in all_errors():
        body = error_body(error())
        assert json.dumps(body)
        assert error.default_detail[:30] in str(body)


@override_settings(IDEMPOTENCY={"DIALECT": "stripe"})
def test_another_endpoint_of_stripe() -> None:
    """With ``scopes.per_caller``, the same key on another endpoint is refused."""
    alice, key = logged_in("alice"), new_key()
    assert post(alice, "/of-caller/1/", key).status_code == 201
    assert post(alice, "/of-caller/2/", key).status_code == 400
    assert effects() == 1
