"""Stripe's own client against views with the dialect of Stripe, over a real server."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import stripe
from django.db import connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from idempotency_django import signals
from idempotency_django.decorators import idempotent
from idempotency_django.policy import scopes
from idempotency_django.testing import in_threads
from tests.models import Effect
from tests.support.shared import effects, new_key

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


@idempotent(scope=scopes.per_caller)
def charge(request: HttpRequest) -> HttpResponse:
    """Charges a card; some amounts are declined, or meet an error of the server once."""
    amount = request.POST["amount"]
    made = Effect.objects.create(reference=amount)
    if amount == "402":
        error = {"type": "card_error", "code": "card_declined", "message": "Declined."}
        return JsonResponse({"error": error}, status=402)
    if amount == "500" and not BROKEN:
        BROKEN.append(made.pk)
        return JsonResponse({"error": {"type": "api_error", "message": "Broken."}}, status=500)
    return JsonResponse({"id": f"ch_{made.pk}", "object": "charge", "amount": int(amount)})


BROKEN: list[int] = []
urlpatterns = [
    path("v1/charges", csrf_exempt(charge)),
    path("v1/refunds", csrf_exempt(charge)),
]


@pytest.fixture
def client(live_server: Any, settings: Any) -> stripe.StripeClient:
    settings.IDEMPOTENCY = {"DIALECT": "stripe"}
    return stripe.StripeClient("sk_test_alice", base_addresses={"api": live_server.url})


def test_replay(client: stripe.StripeClient) -> None:
    """A retry parses as the same charge, and says that it is a replay."""
    key = new_key()
    first, again = (
        client.v1.charges.create({"amount": 17}, {"idempotency_key": key}) for _ in range(2)
    )
    assert first.id == again.id
    assert first.last_response.headers.get("Idempotent-Replayed") is None
    assert again.last_response.headers["Idempotent-Replayed"] == "true"
    assert effects("17") == 1


def test_mismatch(client: stripe.StripeClient) -> None:
    """Other parameters, or another endpoint, are an IdempotencyError."""
    key: Any = {"idempotency_key": new_key()}
    client.v1.charges.create({"amount": 17}, key)
    for call in (client.v1.charges.create, client.v1.refunds.create):
        with pytest.raises(stripe.IdempotencyError) as raised:
            call({"amount": 18}, key)
        assert raised.value.http_status == 400
        assert "different request" in str(raised.value)
    assert effects("18") == 0


def test_malformed(client: stripe.StripeClient) -> None:
    """A key that is too long is an IdempotencyError, too."""
    with pytest.raises(stripe.IdempotencyError):
        client.v1.charges.create({"amount": 17}, {"idempotency_key": "k" * 256})


def test_in_progress(client: stripe.StripeClient) -> None:
    """The duplicate of a request that is running gets a 409 whose code says so."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite makes it wait")
    key: Any = {"idempotency_key": new_key(), "max_network_retries": 0}
    inner: list[Any] = []
    once = threading.Lock()

    def duplicate(**_: Any) -> None:
        if once.acquire(blocking=False):
            with pytest.raises(stripe.APIError) as raised:
                in_threads([lambda: client.v1.charges.create({"amount": 17}, key)])
            inner.append(raised.value)

    signals.claimed.connect(duplicate)
    try:
        client.v1.charges.create({"amount": 17}, key)
    finally:
        signals.claimed.disconnect(duplicate)
    assert inner[0].http_status == 409
    assert inner[0].json_body["error"]["code"] == "idempotency_key_in_use"
    assert inner[0].headers["Stripe-Should-Retry"] == "true"
    assert effects("17") == 1


def test_declined(client: stripe.StripeClient) -> None:
    """A declined card is declined again, without a second attempt to charge it."""
    key: Any = {"idempotency_key": new_key()}
    for _ in range(2):
        with pytest.raises(stripe.CardError):
            client.v1.charges.create({"amount": 402}, key)
    assert effects("402") == 1


def test_own_retries(client: stripe.StripeClient) -> None:
    """After a 500 the client tries again by itself, with its own key: one effect."""
    BROKEN.clear()
    made = client.v1.charges.create({"amount": 500}, {"max_network_retries": 1})
    assert made.amount == 500
    assert len(BROKEN) == 1
    assert effects("500") == 1
