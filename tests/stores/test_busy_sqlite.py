"""SQLite, whose one write lock somebody else holds: who is told what."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, connections
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from tests.support.shared import assert_problem, assert_replays, effects, new_key, post
from tests.support.views import Mixed, create

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
    pytest.mark.skipif(connection.vendor != "sqlite", reason="the lock is SQLite's"),
]


urlpatterns = [
    path("view/", idempotent(create)),
    path("drf/", Mixed.as_view()),
    path("leased/", idempotent(mode="leased")(create)),
    path("accepted/", idempotent(mode="leased", on_conflict="accepted")(create)),
]


@contextmanager
def locked() -> Iterator[None]:
    """Somebody else writes, for the length of the block."""
    holder = sqlite3.connect(str(connection.settings_dict["NAME"]), isolation_level=None, uri=True)
    holder.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        holder.close()


@pytest.fixture(autouse=True)
def options(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The options of new connections, which do not wait for the lock."""
    given: dict[str, Any] = {**connection.settings_dict["OPTIONS"], "timeout": 0.01}
    monkeypatch.setitem(connections.settings["default"], "OPTIONS", given)
    connection.close()
    yield given
    connection.close()


def assert_busy(response: Any) -> None:
    """The database is to blame, and not the key."""
    problem = assert_problem(response, 503, "store-unavailable")
    assert problem["detail"].startswith("Another transaction has locked the database")
    assert int(response["Retry-After"]) > 0


@pytest.mark.parametrize("url", ["/view/", "/drf/", "/leased/", "/accepted/"])
def test_new_key(client: Client, url: str) -> None:
    """A request with a new key is told that the database is busy, and runs at the next try."""
    key = new_key()
    with locked():
        for _ in "ab":
            assert_busy(post(client, url, key))
    assert effects() == 0
    first = post(client, url, key)
    assert first.status_code == 201
    assert_replays(first, post(client, url, key))
