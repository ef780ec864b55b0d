"""How many messages a request sends to PostgreSQL, counted from libpq's trace."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from tests.models import Effect
from tests.support import effects, new_key, post, record

pytestmark = [
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="needs PostgreSQL"),
    pytest.mark.skipif(
        "not hasattr(connection.Database, 'ClientCursor')", reason="needs psycopg 3"
    ),
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
]


def bare(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(reference="a")
    return JsonResponse({}, status=201)


def with_atomic(request: HttpRequest) -> HttpResponse:
    """Has its effect in a transaction that a late owner cannot commit."""
    with request.idempotency.atomic():  # type: ignore[attr-defined]
        return bare(request)


def with_a_step(request: HttpRequest) -> HttpResponse:
    request.idempotency.step("a", lambda: None)  # type: ignore[attr-defined]
    return JsonResponse({}, status=201)


urlpatterns = [
    path("bare/", bare),
    path("transaction/", transaction.atomic(bare)),
    path("first/", idempotent(bare)),
    path("uncounted/", idempotent(record_replays=False)(bare)),
    path("leased/", idempotent(mode="leased")(bare)),
    path("atomic/", idempotent(mode="leased")(with_atomic)),
    path("step/", idempotent(mode="leased")(with_a_step)),
]


@contextmanager
def messages() -> Iterator[list[str]]:
    """What is sent to the server within the block, one entry for each message."""
    sent: list[str] = []
    connection.ensure_connection()
    driver = connection.connection
    with tempfile.NamedTemporaryFile("r") as trace:
        driver.pgconn.trace(trace.fileno())
        try:
            yield sent
        finally:
            driver.pgconn.untrace()
        trace.seek(0)  # libpq writes through the same descriptor
        for line in trace.read().splitlines():
            _, sender, *what = [*line.split("\t"), ""]  # a statement may go on in the next line
            if sender == "F":
                sent.append(what[-2])


def sent_by(client: Client, url: str, key: str | None) -> list[str]:
    """The messages of a request that succeeds."""
    with messages() as sent:
        assert post(client, url, key).status_code == 201
    return sent


class TestBudget:
    """The messages of a whole request, where a bare one in ``atomic()`` sends three."""

    def test_first_request(self, client: Client) -> None:
        """A first request sends as many as a bare one in a transaction."""
        post(client, "/first/", new_key())
        assert len(sent_by(client, "/transaction/", None)) == 3
        assert len(sent_by(client, "/first/", new_key())) == 3
        assert effects() == 3

    def test_replay(self, client: Client) -> None:
        """A replay sends two, its count included."""
        key = new_key()
        post(client, "/first/", key)
        assert len(sent_by(client, "/first/", key)) == 2
        assert record(key).replay_count == 1

    def test_leased(self, client: Client) -> None:
        """A leased request sends two more than its handler."""
        post(client, "/leased/", new_key())
        assert len(sent_by(client, "/bare/", None)) == 1
        assert len(sent_by(client, "/leased/", new_key())) == 3
