"""A failed attempt is no response, whatever a store says of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import Client, override_settings
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from idempotency_django.decorators import idempotent
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Claim, Operation, Record, Status
from tests.support.shared import new_key, post


class KeepsFailures(MemoryStore):
    """A store of somebody else's, which shows a failed record instead of claiming it."""

    def acquire(self, operation: Operation) -> Claim | Record:
        found = self.get(operation.key, operation.scope)
        same = found and (found.status, found.fingerprint) == (
            Status.FAILED,
            operation.fingerprint,
        )
        return found if found and same else super().acquire(operation)


runs: list[str] = []


@csrf_exempt
@idempotent(mode="leased")
def flaky(request: HttpRequest) -> HttpResponse:
    """Fails the first time."""
    runs.append("run")
    return HttpResponse(status=500 if len(runs) == 1 else 201)


urlpatterns = [path("flaky/", flaky)]


@pytest.fixture
def _theirs() -> Iterator[None]:
    runs.clear()
    stores = {"default": {"BACKEND": f"{__name__}.KeepsFailures"}}
    with override_settings(ROOT_URLCONF=__name__, IDEMPOTENCY={"STORES": stores}):
        yield


@pytest.mark.usefixtures("_theirs")
@pytest.mark.django_db(transaction=True)
def test_a_failure_is_not_replayed(client: Client) -> None:
    """The retry of a failed attempt is told to come back, and not that it was done."""
    key = new_key()
    assert post(client, "/flaky/", key).status_code == 500
    retry = post(client, "/flaky/", key)
    assert retry.status_code == 409
    assert "Idempotent-Replayed" not in retry
    assert retry["Retry-After"]
    assert len(runs) == 1
