"""The transactions of ATOMIC_REQUESTS, opened by the adapter instead of by Django."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from django.conf import settings
from django.core.handlers.base import BaseHandler
from django.db import OperationalError, connection, connections, transaction
from django.http import HttpRequest

from idempotency_django.http.atomic_requests import (
    ExcludedDatabases,
    RequestTransactions,
    request_transactions,
    take_over_transactions,
)
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from tests.models import Effect
from tests.support import effects

ALIASES = list(settings.DATABASES)
pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__"), pytest.mark.driver]


@pytest.fixture
def atomic_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """ATOMIC_REQUESTS is on for every database."""
    for alias in ALIASES:
        monkeypatch.setitem(connections.settings[alias], "ATOMIC_REQUESTS", True)


def open_aliases() -> list[str]:
    """The databases in which a transaction is open."""
    return [alias for alias in ALIASES if connections[alias].in_atomic_block]


def a_view(request: HttpRequest) -> list[str]:
    """A view that tells in which databases a transaction is open."""
    return open_aliases()


def as_django_runs_it(view: Any) -> list[str]:
    """What the view returns below Django's handler."""
    return BaseHandler().make_view_atomic(view)(HttpRequest())


@pytest.fixture
def view() -> Iterator[Any]:
    """A function of its own for each test."""

    def view(request: HttpRequest) -> list[str]:
        return a_view(request)

    return view  # type: ignore[return-value]


@pytest.mark.usefixtures("atomic_requests")
def test_django_leaves_an_owned_view_alone(view: Any) -> None:
    """Django opens its transactions around a view, unless they are the adapter's."""
    assert as_django_runs_it(view) == ALIASES
    assert list(take_over_transactions(view)) == []
    assert as_django_runs_it(view) == []


def test_what_the_author_left_out_is_kept(view: Any) -> None:
    """non_atomic_requests counts, below the adapter and above it."""
    transaction.non_atomic_requests(using="first")(view)
    owned = take_over_transactions(view)
    transaction.non_atomic_requests(using="second")(view)
    assert set(iter(owned)) == {"first", "second"}
    assert "never named" in owned
    assert isinstance(view._non_atomic_requests, ExcludedDatabases)


def test_nothing_is_opened_without_atomic_requests() -> None:
    """A project without ATOMIC_REQUESTS gets no transaction that it did not ask for."""
    with request_transactions(set()) as transactions:
        assert open_aliases() == []
        assert transactions.around_claim(DatabaseStore("default")) is None


@pytest.mark.usefixtures("atomic_requests")
def test_all_are_opened() -> None:
    """What Django would open is opened, and closed again."""
    with request_transactions(ExcludedDatabases()):
        assert open_aliases() == ALIASES
    assert open_aliases() == []


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("excluded", [{"default"}, ExcludedDatabases({"default"})])
def test_excluded_databases(excluded: set[str]) -> None:
    """A database that the author took out stays out, although ExcludedDatabases "contain" all."""
    with request_transactions(excluded) as transactions:
        assert open_aliases() == ALIASES[1:]
        after = transactions.around_claim(DatabaseStore("default"))
        # A response is not committed before the others are, so that its transaction is one of them.
        assert open_aliases() == (ALIASES if after else [])
        assert (after is None) == (len(ALIASES) == 1)
    assert open_aliases() == []


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("fails", [False, True])
def test_callbacks_run_after_the_transactions(fails: bool) -> None:
    """What waits for a transaction's end runs when it has committed or rolled back."""
    seen: list[tuple[list[str], int]] = []

    def request() -> None:
        with request_transactions(set()) as transactions:
            after = transactions.around_claim(DatabaseStore("default"))
            assert after is not None
            after.callback(lambda: seen.append((open_aliases(), effects())))
            Effect.objects.create(reference="a")
            if fails:
                raise ValueError

    if fails:
        with pytest.raises(ValueError):  # noqa: PT011  # the one that was raised
            request()
    else:
        request()
    assert seen == [([], 0 if fails else 1)]
    assert effects() == (0 if fails else 1)
    assert not connection.in_atomic_block


@pytest.mark.usefixtures("atomic_requests")
def test_store_without_a_database_waits_for_nothing() -> None:
    """A store that takes part in no transaction is not held up by one."""
    with request_transactions(set()) as transactions:
        assert transactions.around_claim(MemoryStore("memory")) is None


def told_of(
    request: Any, transactions: RequestTransactions, store: DatabaseStore
) -> list[BaseException | None]:
    """What is told, at the end of the request's transactions, to what waits for them."""
    told: list[BaseException | None] = []

    def note(_: object, error: BaseException | None, __: object) -> None:
        told.append(error)

    with suppress(ValueError, OperationalError), transactions:
        after = transactions.around_claim(store)
        assert after is not None
        after.push(note)
        request()
    return told


@pytest.mark.usefixtures("atomic_requests")
class TestEnd:
    """What becomes of the transactions, and what is told of it."""

    store = DatabaseStore("default")

    def raising(self, error: Exception) -> Any:
        def request() -> None:
            Effect.objects.create(reference="a")
            raise error

        return request

    def test_commit(self) -> None:
        """Where all is committed, there is nothing to tell."""
        create = lambda: Effect.objects.create(reference="a")  # noqa: E731
        assert told_of(create, request_transactions(set()), self.store) == [None]
        assert effects() == 1

    def test_error(self) -> None:
        """What the request raised is told."""
        error = ValueError()
        assert told_of(self.raising(error), request_transactions(set()), self.store) == [error]
        assert effects() == 0

    def test_operational_error(self) -> None:
        """One that the request raised leaves no doubt about the rollback, as one at COMMIT does."""
        request = self.raising(OperationalError("no such table"))
        [told] = told_of(request, request_transactions(set()), self.store)
        assert not isinstance(told, OperationalError)
        assert str(told) == "no such table"
        assert effects() == 0

    def test_marked_for_rollback(self) -> None:
        """A rollback that nobody raised is told as well, and all databases are rolled back."""

        def request() -> None:
            for alias in ALIASES:
                Effect.objects.using(alias).create(reference="a")
            transaction.set_rollback(True, using=self.store.using)

        [told] = told_of(request, request_transactions(set()), self.store)
        assert isinstance(told, transaction.TransactionManagementError)
        assert [Effect.objects.using(alias).count() for alias in ALIASES] == [0] * len(ALIASES)

    @pytest.mark.skipif(len(ALIASES) < 2, reason="one database only")
    def test_another_is_marked(self) -> None:
        """A view may roll back a database that is not the store's: that one only, as in Django."""

        def request() -> None:
            for alias in ALIASES:
                Effect.objects.using(alias).create(reference="a")
            transaction.set_rollback(True, using=ALIASES[-1])

        assert told_of(request, request_transactions(set()), self.store) == [None]
        assert Effect.objects.using(ALIASES[-1]).count() == 0
        assert effects() == 1

    @pytest.mark.parametrize("alias", ALIASES)
    def test_store_commits_last(self, alias: str) -> None:
        """Whichever database the store is in: a response is only stored when all else is."""
        committed: list[str] = []

        def request() -> None:
            for each in ALIASES:
                transaction.on_commit(lambda each=each: committed.append(each), using=each)

        told_of(request, request_transactions(set()), DatabaseStore("default", using=alias))
        assert sorted(committed) == sorted(ALIASES)
        assert committed[-1] == alias

    @pytest.mark.parametrize("alias", ALIASES)
    def test_one_that_cannot_begin(self, alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those that have begun are ended."""

        def fail(*_: Any, **__: Any) -> None:
            raise OperationalError

        connections[alias].ensure_connection()
        with monkeypatch.context() as patch, pytest.raises(OperationalError):
            patch.setattr(connections[alias], "set_autocommit", fail)
            with request_transactions(set()):
                pytest.fail("It began.")
        assert open_aliases() == []


@pytest.mark.skipif("sqlite" not in settings.ALIASES, reason="a reader is in SQLite's way")
@pytest.mark.parametrize("alias", ALIASES)
def test_commit_that_is_refused(alias: str) -> None:
    """At COMMIT, "locked" leaves no doubt, in the store's database or another one: it is told as an
    error that has rolled back.
    """
    store, locked = DatabaseStore("default", using=alias), settings.ALIASES["sqlite"]
    reader = sqlite3.connect(connections[locked].settings_dict["NAME"])

    def request() -> None:
        with connections[locked].cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout = 1")
        for each in {alias, locked}:
            Effect.objects.using(each).create(reference="a")
        reader.execute("BEGIN")
        reader.execute("SELECT 1 FROM django_migrations").fetchone()

    try:
        with closing(reader):
            [told] = told_of(request, RequestTransactions([*{alias, locked}]), store)
    finally:
        connections[locked].close()
    assert not isinstance(told, OperationalError)
    assert str(told) == "database is locked"
    assert Effect.objects.using(alias).count() == Effect.objects.using(locked).count() == 0


def test_commit_of_which_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the store's own COMMIT that says no more is told as it is."""
    error = OperationalError("server closed the connection unexpectedly")

    def lose() -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(connection, "commit", lose)
        told = told_of(lambda: None, RequestTransactions(["default"]), DatabaseStore("default"))
    assert told == [error]


def test_commit_that_fails_without_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request in which nothing was claimed fails as it would in Django."""

    def lose() -> None:
        raise OperationalError

    with monkeypatch.context() as patch, pytest.raises(OperationalError):
        patch.setattr(connection, "commit", lose)
        with RequestTransactions(["default"]):
            Effect.objects.create(reference="a")
    assert effects() == 0
