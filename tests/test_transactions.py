"""The transactions of ATOMIC_REQUESTS, opened by the adapter instead of by Django."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings
from django.core.handlers.base import BaseHandler
from django.db import connection, connections, transaction
from django.http import HttpRequest

from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.transactions import OwnedTransactions, own, request_transactions
from tests.models import Effect
from tests.support import effects

ALIASES = list(settings.DATABASES)
pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


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
    """What the view answers below Django's handler."""
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
    assert list(own(view)) == []
    assert as_django_runs_it(view) == []


def test_what_the_author_left_out_is_kept(view: Any) -> None:
    """non_atomic_requests counts, below the adapter and above it."""
    transaction.non_atomic_requests(using="first")(view)
    owned = own(view)
    transaction.non_atomic_requests(using="second")(view)
    assert set(iter(owned)) == {"first", "second"}
    assert "never named" in owned
    assert isinstance(view._non_atomic_requests, OwnedTransactions)


def test_nothing_is_opened_without_atomic_requests() -> None:
    """A project without ATOMIC_REQUESTS gets no transaction that it did not ask for."""
    with request_transactions(set()) as transactions:
        assert open_aliases() == []
        assert transactions.around(DatabaseStore("default")) is None


@pytest.mark.usefixtures("atomic_requests")
def test_all_are_opened() -> None:
    """What Django would open is opened, and closed again."""
    with request_transactions(OwnedTransactions()):
        assert open_aliases() == ALIASES
    assert open_aliases() == []


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("excluded", [{"default"}, OwnedTransactions({"default"})])
def test_excluded_databases(excluded: set[str]) -> None:
    """A database that the author took out stays out, although OwnedTransactions "contain" all."""
    with request_transactions(excluded) as transactions:
        assert open_aliases() == ALIASES[1:]
        assert transactions.around(DatabaseStore("default")) is None


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("fails", [False, True])
def test_callbacks_run_after_the_transactions(fails: bool) -> None:
    """What waits for a transaction's end runs when it has committed or rolled back."""
    seen: list[tuple[list[str], int]] = []

    def request() -> None:
        with request_transactions(set()) as transactions:
            after = transactions.around(DatabaseStore("default"))
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
        assert transactions.around(MemoryStore("memory")) is None
