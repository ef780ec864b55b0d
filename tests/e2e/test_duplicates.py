"""What becomes of many duplicates that arrive at the same moment."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.nightly import nightly, sizes

from .clients import ASYNC, TRANSFERS, Api, Order, executed_of, verdict
from .conftest import client_of
from .databases import Database

pytestmark = pytest.mark.e2e

PATH = "/api/charges/"
DUPLICATES = 50
WORK = "sleep-ms=5000"  # for the others to get theirs meanwhile, however slowly


@pytest.mark.parametrize("keys", sizes(10, 100))
def test_one_of_many_duplicates_is_executed(api: Api, database: Database, keys: int) -> None:
    """Of 50 duplicates at once, for each of many keys, one is executed; the others receive its
    response or are told to come back. None fails.
    """
    assert_one_is_executed(api, PATH, keys if database.name != "sqlite" else keys // 5)


@pytest.mark.parametrize("keys", sizes(10, 100))
@pytest.mark.parametrize("database", ["postgres"], indirect=True)
@pytest.mark.parametrize("store", ["redis", "cached"])
def test_one_of_many_duplicates_is_executed_with_redis(
    store: str, database: Database, keys: int, request: pytest.FixtureRequest
) -> None:
    """The same holds where Redis keeps the records, and where it serves the replays."""
    with client_of(request.getfixturevalue(f"{store}_server")) as api:
        assert_one_is_executed(api, PATH, keys)


@pytest.mark.parametrize("keys", sizes(2, 20))
@pytest.mark.parametrize("server_name", ["server", "asgi_server"], ids=["wsgi", "asgi"])
def test_one_of_many_duplicates_is_executed_by_an_async_view(
    server_name: str, database: Database, keys: int, request: pytest.FixtureRequest
) -> None:
    """The same holds for an async view, under WSGI and under ASGI."""
    with client_of(request.getfixturevalue(server_name)) as api:
        assert_one_is_executed(api, ASYNC, keys)


def assert_one_is_executed(api: Api, path: str, keys: int) -> None:
    """Send many duplicates at once, for each of the keys, and check their responses and effects."""
    told: Counter[str] = Counter()
    for _ in range(keys):
        order = Order()
        responses = api.send_at_once(path, order, DUPLICATES)
        executed = executed_of(responses)
        told.update(verdict(response, executed) for response in responses)
        assert api.effects(order) == 1

    assert set(told) <= {"executed", "replayed", "in progress"}
    assert told["executed"] == keys
    assert told.total() == keys * DUPLICATES


@pytest.mark.parametrize("database", ["postgres", nightly("mariadb")], indirect=True)
@pytest.mark.parametrize("path", [PATH, TRANSFERS, ASYNC])
def test_duplicates_do_not_queue_behind_the_first(api: Api, database: Database, path: str) -> None:
    """While the first works for seconds, all others get a response; its own comes last."""
    order = Order(fault=WORK)
    *refused, last = api.send_at_once(path, order, DUPLICATES)

    assert last is executed_of([*refused, last])
    assert {verdict(response, last) for response in refused} == {"in progress"}
    assert api.effects(order) == 1


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_on_sqlite_duplicates_wait_for_the_first(api: Api, database: Database) -> None:
    """SQLite has one writer at a time: duplicates wait for the first and receive its response."""
    order = Order(fault="sleep-ms=2000")

    responses = api.send_at_once(PATH, order, DUPLICATES)

    told = Counter(verdict(response, executed_of(responses)) for response in responses)
    assert told == {"executed": 1, "replayed": DUPLICATES - 1}
    assert api.effects(order) == 1
