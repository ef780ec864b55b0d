"""SQLite, whose one write lock somebody else holds for too long: who is told what."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, connections
from django.test import Client
from django.urls import path

from idempotency_django.decorators import idempotent
from idempotency_django.engine import Result, run
from idempotency_django.errors import OperationInProgress, StoreUnavailable
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores.database import DIALECTS, DatabaseStore
from idempotency_django.stores.records import Claim, Status
from idempotency_django.testing import RESPONSE, an_operation
from tests.models import Effect
from tests.settings import ALIASES
from tests.support.shared import assert_problem, assert_replays, effects, new_key, post
from tests.support.views import Mixed, create

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.urls(__name__),
    pytest.mark.skipif("sqlite" not in ALIASES, reason="the lock is SQLite's"),
    pytest.mark.driver,
]

USING = ALIASES.get("sqlite", "")

urlpatterns = [
    path("view/", idempotent(create)),
    path("drf/", Mixed.as_view()),
    path("leased/", idempotent(mode="leased")(create)),
    path("accepted/", idempotent(mode="leased", on_conflict="accepted")(create)),
]


@pytest.fixture
def impatient() -> Iterator[DatabaseStore]:
    """A store that waits for the lock for a moment only."""
    connections[USING].close()
    options = connections[USING].settings_dict["OPTIONS"]
    timeout, options["timeout"] = options["timeout"], 0.05
    yield DatabaseStore("default", using=USING)
    connections[USING].close()
    options["timeout"] = timeout


@contextmanager
def locked() -> Iterator[None]:
    """Somebody else writes, for the length of the block."""
    name = connections[USING].settings_dict["NAME"]
    holder = sqlite3.connect(name, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        holder.close()


@pytest.mark.parametrize("kind", ["step", "fence", "handler"])
def test_transaction_that_cannot_begin(impatient: DatabaseStore, kind: str) -> None:
    """So is whatever a claim's owner begins: a step, a fenced or its handler's transaction."""
    claim = impatient.acquire(an_operation(lease=timedelta(seconds=30)))
    assert isinstance(claim, Claim)
    begins = {
        "step": impatient.durable("It"),
        "fence": impatient.fenced(claim),
        "handler": impatient.transaction(),
    }[kind]
    with locked(), pytest.raises(OperationInProgress), begins:
        pytest.fail("It began.")
    with impatient.durable("It"):
        pass


@pytest.mark.parametrize("kind", ["request", "step", "fence"])
def test_transaction_that_cannot_end(impatient: DatabaseStore, kind: str) -> None:
    """At COMMIT, where a reader is in the way, nobody says that nothing was executed; but what
    is one transaction as a whole is said to have rolled back.
    """
    refused, told = {
        "request": (OperationInProgress, "could not commit.* has rolled back"),
        "step": (StoreUnavailable, "so the result is unknown"),
        "fence": (StoreUnavailable, "so the result is unknown"),
    }[kind]
    operation = an_operation(lease=None if kind == "request" else timedelta(seconds=30))
    reader = sqlite3.connect(connections[USING].settings_dict["NAME"])
    with closing(reader), pytest.raises(refused, match=told), ExitStack() as stack:
        if kind == "request":
            stack.enter_context(impatient.transaction())
            found = impatient.acquire(operation)
        else:
            found = impatient.acquire(operation)
            assert isinstance(found, Claim)
            begun = impatient.durable("It") if kind == "step" else impatient.fenced(found)
            stack.enter_context(begun)
        assert isinstance(found, Claim)
        Effect.objects.using(USING).create(reference="a")
        reader.execute("BEGIN")
        reader.execute("SELECT 1 FROM django_migrations").fetchone()
    assert not Effect.objects.using(USING).exists()


def test_attempt_that_cannot_commit(impatient: DatabaseStore) -> None:
    """An attempt that is refused at COMMIT has failed as any other: the record says so."""
    operation = an_operation()
    reader = sqlite3.connect(connections[USING].settings_dict["NAME"])

    def execute(execution: Any) -> Result:
        Effect.objects.using(USING).create(reference="a")
        reader.execute("BEGIN")
        reader.execute("SELECT 1 FROM django_migrations").fetchone()
        return Result("response", RESPONSE)

    def recover(error: Exception) -> Result:
        reader.close()  # it is away when the failure is written down
        raise error

    with closing(reader), pytest.raises(OperationInProgress, match="has rolled back") as caught:
        run(impatient, operation, execute, recover)
    assert (caught.value.state, caught.value.safe_new_key) == ("not-executed", False)
    row = IdempotencyKey.objects.using(USING).get()
    assert (row.status, row.attempt) == (Status.FAILED, 1)
    assert not Effect.objects.using(USING).exists()


def test_shared_memory_is_busy() -> None:
    """Contention for a SQLite database in memory, as test databases are, is no fault either."""
    name = "file:shared?mode=memory&cache=shared"
    holder, other = (sqlite3.connect(name, uri=True, isolation_level=None) for _ in range(2))
    try:
        holder.execute("CREATE TABLE t (x)")
        holder.execute("BEGIN IMMEDIATE")
        holder.execute("INSERT INTO t VALUES (1)")
        for sql in ("SELECT * FROM t", "BEGIN IMMEDIATE", "INSERT INTO t VALUES (2)"):
            with pytest.raises(sqlite3.OperationalError) as caught:
                other.execute(sql).fetchall()
            error = OperationalError()
            error.__cause__ = caught.value
            assert DIALECTS["sqlite"]("default").is_busy(error)
    finally:
        holder.close()
        other.close()


def assert_busy(response: Any) -> None:
    """The database is to blame, and not the key."""
    problem = assert_problem(response, 503, "store-unavailable")
    assert problem["detail"].startswith("Another transaction has locked the database")
    assert int(response["Retry-After"]) > 0


@pytest.mark.skipif(connection.vendor != "sqlite", reason="the views write to the default database")
@pytest.mark.usefixtures("impatient")
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
