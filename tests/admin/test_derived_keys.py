"""Where an operator finds the keys that a handler derived: a page of the admin."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.http import JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from idempotency_django.models import IdempotencyKey
from tests.support.admin_pages import detail, member
from tests.support.shared import new_key, post
from tests.urls import urlpatterns as tests_urls

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

derived: list[dict[str, str]] = []


@idempotent(mode="leased")
def pay(request: Any) -> JsonResponse:
    execution = request.idempotency
    names = ("charge", "refund")
    derived.append({name: execution.derive_key(name) for name in names})
    execution.step("charge", lambda: 1)
    if "fail" in json.loads(request.body)["reference"]:
        raise LookupError
    return JsonResponse({})


urlpatterns = [*tests_urls, path("pay/", pay)]


def paid(reference: str = "a") -> tuple[str, dict[str, str]]:
    """The key of an operation that was executed, and the keys that its handler derived."""
    key, client = new_key(), Client(raise_request_exception=False)
    post(client, "/pay/", key, reference)
    return key, derived[-1]


class TestPage:
    """In the admin."""

    @pytest.mark.parametrize("reference", ["a", "to fail"])
    def test_keys(self, reference: str, settings: Any) -> None:
        """It shows what the handler derived: for the stored steps, and for any name typed, which is
        text and no HTML. They are made of what is stored: a new SECRET_KEY changes nothing.
        """
        key, handed_out = paid(reference)
        record = IdempotencyKey.objects.get(key=key)
        client = member("view_idempotencykey", "view_response")
        said = client.get(detail(record)).content.decode()
        assert handed_out["charge"] in said
        assert handed_out["refund"] not in said
        settings.SECRET_KEY = "new"
        client = member("view_idempotencykey", "view_response")
        said = client.get(detail(record), {"name": "refund"}).content.decode()
        assert handed_out["charge"] in said
        assert handed_out["refund"] in said
        assert "<b>x" not in client.get(detail(record), {"name": "<b>x</b>"}).content.decode()

    def test_permissions(self) -> None:
        """Without ``view_response`` nobody sees them: a guess could be compared with them."""
        record = IdempotencyKey.objects.get(key=paid()[0])
        auditor = member("view_idempotencykey", "settle", "delete_idempotencykey")
        said = auditor.get(detail(record), {"name": "charge"}).content.decode()
        assert "Derived keys" not in said
        assert derived[-1]["charge"] not in said
        assert member("view_response").get(detail(record)).status_code == 403
        assert Client().get(detail(record)).status_code == 302
