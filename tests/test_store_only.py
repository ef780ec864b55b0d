"""``store_only()``: an allow-list of the statuses that are stored."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import Http404, HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from idempotency_django import Policy, idempotent
from idempotency_django.policy import store_only
from tests.models import Effect
from tests.support import effects, is_replay, new_key

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


@idempotent(should_store=store_only(201, 409, 404))
def answering(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    status = int(request.GET["status"])
    if status == 404:
        raise Http404
    return HttpResponse(status=status)


urlpatterns = [path("", answering)]


@pytest.mark.parametrize(
    ("status", "stored", "kept"),
    [(201, True, 1), (409, True, 1), (404, True, 0), (200, False, 0), (422, False, 0)],
)
def test_statuses(status: int, stored: bool, kept: int) -> None:
    """The listed statuses are stored, temporary ones and raised errors too; others free the key."""
    headers = {"Idempotency-Key": new_key()}
    first, retry = [Client().post(f"/?status={status}", headers=headers) for _ in range(2)]
    assert first.status_code == retry.status_code == status
    assert is_replay(retry) == stored
    assert effects() == kept


def test_equal() -> None:
    """A policy that is made for each request is equal to the one before."""
    assert Policy(should_store=store_only(200)) == Policy(should_store=store_only(200))
    assert Policy(should_store=store_only(200)) != Policy(should_store=store_only(201))


@pytest.mark.parametrize("statuses", [(), (500,), (100,), ("200",), ((200, 201),)])
def test_refused(statuses: tuple[Any, ...]) -> None:
    """A list of nothing, and what is no status that can be stored, is refused where it is said."""
    with pytest.raises(ImproperlyConfigured, match="needs HTTP statuses from 200 to 499"):
        store_only(*statuses)
