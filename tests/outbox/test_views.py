"""Publishing in views whose key is optional: without a key, they run as if unprotected."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.test import Client
from django.urls import clear_url_caches, path
from django.views import View
from rest_framework.views import APIView

from idempotency_django.checks import check_views
from idempotency_django.contrib.messaging import outbox, publish
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from tests.support import new_key

redis: Any = None
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


@idempotent
def bare(request: HttpRequest, way: str) -> JsonResponse:
    return JsonResponse({"id": WAYS[way]()})


@idempotent
def atomic(request: HttpRequest, way: str) -> JsonResponse:
    with transaction.atomic():
        return JsonResponse({"id": WAYS[way]()})


urlpatterns = [path("bare/<way>/", bare), path("atomic/<way>/", atomic)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "key"}], ids=["no key", "a key"])
def test_own_transaction(headers: dict[str, Any], way: str) -> None:
    """In a transaction of its own, a view publishes with and without a key, under a random id."""
    headers = {name: new_key() for name in headers}
    published = Client().post(f"/atomic/{way}/", headers=headers).json()["id"]
    assert OutboxMessage.objects.get().message_id == published
    assert uuid.UUID(published).version == 7


@pytest.mark.parametrize("way", WAYS)
def test_no_transaction(way: str) -> None:
    """Without a key, nothing has opened a transaction: that is said, and nothing is published."""
    with pytest.raises(ImproperlyConfigured, match=rf"^{way}\(\) .* sends no key.* required=True"):
        Client().post(f"/bare/{way}/")
    assert not OutboxMessage.objects.exists()
    key = {"Idempotency-Key": new_key()}
    assert Client().post(f"/bare/{way}/", headers=key).status_code == 200


@idempotent(required=True)
def required(request: HttpRequest) -> None:
    publish("orders", 1, type="n")


@idempotent(mode="leased")
def leased(request: HttpRequest) -> None:
    publish("orders", 1, type="n")


@idempotent
@transaction.atomic
def decorated(request: HttpRequest) -> None:
    publish("orders", 1, type="n")


@transaction.atomic
@idempotent
def around(request: HttpRequest) -> None:
    publish("orders", 1, type="n")


@idempotent
def inside(request: HttpRequest) -> None:
    with transaction.atomic():
        publish("orders", 1, type="n")


@idempotent
def optional(request: HttpRequest) -> None:
    publish("orders", 1, type="n")


@idempotent
def calling(request: HttpRequest) -> None:
    outbox.after_commit(receipt)


@idempotent
def other(request: HttpRequest) -> None:
    redis.publish("orders", 1)


@idempotent
def enqueuing(request: HttpRequest) -> None:
    decorated.enqueue_once(17)  # type: ignore[attr-defined]


@idempotent
class Class(View):
    def post(self, request: HttpRequest) -> None:
        publish("orders", 1, type="n")

    def put(self, request: HttpRequest) -> None:
        """Publishes nothing."""


class Mixed(IdempotentViewMixin, APIView):
    def post(self, request: HttpRequest) -> None:
        publish("orders", 1, type="n")


RIGHT = (required, leased, other, decorated, around, inside, atomic)
WRONG = (optional, calling, enqueuing, Class, Mixed)


@pytest.mark.parametrize("view", [*RIGHT, *WRONG], ids=lambda view: view.__name__)
def test_check(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``manage.py check`` says which views publish where there may be no transaction."""
    served = view.as_view() if isinstance(view, type) else view
    monkeypatch.setattr(f"{__name__}.urlpatterns", [path("served/", served)])
    clear_url_caches()
    messages = [message for message in check_views() if message.id.endswith("W059")]
    clear_url_caches()
    assert [view.__name__ in message.msg for message in messages] == [True] * (view in WRONG)
