"""A transaction that the server ends because it was idle."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from django.db import connection, connections
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from idempotency_django.models import IdempotencyKey
from tests.models import Effect
from tests.support.shared import (
    assert_problem,
    effects,
    new_key,
    post,
    record,
    session_of_this_thread,
    wait_for_end,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.driver]

STORE = "idempotency_django.stores.database.DatabaseStore"


def idle(request: HttpRequest) -> HttpResponse:
    """Waits in its transaction for longer than the server allows."""
    Effect.objects.create(reference="idle")
    number = session_of_this_thread()
    with connection.cursor() as cursor:
        # Last: a slow machine may take longer than that from one statement to the next.
        cursor.execute("SET idle_in_transaction_session_timeout = '10ms'")
    wait_for_end(of=number)
    return HttpResponse(status=201)


urlpatterns = [path("idle/", idempotent(idle))]


class ReasonLost(Exception):
    """The driver has heard that the connection is lost, and not why.

    On a busy machine, it often meets the closed connection before it reads the server's reason.
    """


def _lose_twice(client: Client, *, atomic: bool) -> None:
    key = new_key()
    for attempt in (1, 2):
        response = post(client, "/idle/", key)
        connection.close()
        assert effects("idle") == 0
        problem = assert_problem(response, 503, "store-unavailable")
        assert int(response["Retry-After"]) > 0
        if "did not confirm the commit" in problem["detail"]:  # which was sent
            raise ReasonLost
        assert "so nothing was committed" in problem["detail"]
        if atomic:  # nothing can be recorded in it any more
            assert not IdempotencyKey.objects.exists()
        else:
            assert (record(key).status, record(key).attempt) == ("failed", attempt)


@pytest.mark.skipif(connection.vendor != "postgresql", reason="the timeout is PostgreSQL's")
@pytest.mark.urls(__name__)
@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("combine", [True, False])
def test_nothing_of_it_is_there(
    client: Client, settings: Any, monkeypatch: pytest.MonkeyPatch, *, atomic: bool, combine: bool
) -> None:
    """Its client gets 503, and nothing of it is there, with ATOMIC_REQUESTS or without."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)
    store = {"BACKEND": STORE, "OPTIONS": {"combine_statements": combine}}
    settings.IDEMPOTENCY = {"STORES": {"default": store}}
    for _ in range(20):
        with suppress(ReasonLost):
            _lose_twice(client, atomic=atomic)
            return
    pytest.fail("The driver never told why the connection was lost.")
