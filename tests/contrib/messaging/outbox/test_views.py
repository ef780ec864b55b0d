"""Publishing in views of the leased mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.http import HttpRequest, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.contrib.messaging import outbox
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.decorators import idempotent
from tests.support.shared import assert_problem, new_key

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
    pytest.mark.usefixtures("broker"),
]


def receipt() -> None:
    """What follows."""


WAYS: dict[str, Callable[[], str]] = {
    "publish": lambda: outbox.publish("orders", 1, type="n"),
    "after_commit": lambda: outbox.after_commit(receipt),
}


@idempotent(mode="leased")
def fails_once(request: HttpRequest, way: str) -> JsonResponse:
    """Publish, and fail behind that at the first attempt."""
    with request.idempotency.atomic():  # type: ignore[attr-defined]
        published = WAYS[way]()
    if request.idempotency.attempt == 1:  # type: ignore[attr-defined]
        raise LookupError
    return JsonResponse({"id": published})


urlpatterns = [
    path("fails-once/<way>/", fails_once),
]


@pytest.mark.parametrize("way", WAYS)
def test_another_request_after_a_failure(way: str) -> None:
    """What a leased view has published stays, so its key stays with the request."""
    client, key = Client(raise_request_exception=False), {"Idempotency-Key": new_key()}

    def post(amount: int) -> Any:
        body = {"amount": amount}
        return client.post(f"/fails-once/{way}/", body, "application/json", headers=key)

    assert post(500).status_code == 500
    [message] = OutboxMessage.objects.all()
    assert_problem(post(700), 422, "mismatch")
    assert post(500).json() == {"id": message.message_id}
    assert OutboxMessage.objects.count() == 1
