"""The error of another, nested operation is not the request's own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.errors import (
    FingerprintMismatch,
    IdempotencyError,
    OperationInProgress,
    StoreUnavailable,
)
from idempotency_django.models import IdempotencyKey
from tests.models import Effect
from tests.support.shared import effects, new_key, post, record

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
    pytest.mark.usefixtures("atomic"),
]


def nested(error: str) -> Any:
    """Another operation that ends in an error of ours."""

    def fn(_: Any) -> Any:
        raise {"busy": OperationInProgress, "gone": StoreUnavailable}[error]

    if error in ("busy", "gone"):
        return idempotent_call(fn, key="nested", scope="nested")
    idempotent_call(lambda _: None, key="other", scope="nested", fingerprint=1)
    return idempotent_call(lambda _: None, key="other", scope="nested", fingerprint=2)


def create(request: HttpRequest) -> HttpResponse:
    reference = json.loads(request.body)["reference"]
    Effect.objects.create(reference=reference)
    nested(reference)
    return JsonResponse({}, status=201)


urlpatterns = [
    path("view/", idempotent(create)),
    path("leased/", idempotent(mode="leased")(create)),
]


@pytest.mark.parametrize("url", ["/view/", "/leased/"])
@pytest.mark.parametrize(
    ("reference", "error"),
    [
        ("busy", OperationInProgress),
        ("gone", StoreUnavailable),
        ("other", FingerprintMismatch),
    ],
)
def test_nested(
    client: Client, url: str, reference: str, error: type[IdempotencyError], atomic: bool
) -> None:
    """A nested operation's error is the view's: Django's 500, and no problem of the request."""
    if atomic and url == "/leased/":
        pytest.skip("NO LEASED VIEWS UNDER ATOMIC_REQUESTS")
    key = new_key()
    for attempt in (1, 2):
        with pytest.raises(error):
            post(client, url, key, reference)
        if atomic:  # the record of the attempt has gone with the request's transaction
            assert not IdempotencyKey.objects.filter(key=key).exists()
        else:
            assert (record(key).status, record(key).attempt) == ("failed", attempt)
        assert effects(reference) == 0 or url == "/leased/"


def test_nested_in_a_call() -> None:
    """An outer call raises what its function raised, and does not take it for its own."""
    with pytest.raises(OperationInProgress) as caught:
        idempotent_call(lambda _: nested("busy"), key="outer", scope="nested")
    assert caught.value.foreign
    assert record("outer").status == "failed"
