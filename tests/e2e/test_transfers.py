"""A transfer: two steps in the database, and one in a ledger that is somebody else's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from .clients import TRANSFERS, Api, Order
from .conftest import Server
from .databases import Database

pytestmark = pytest.mark.e2e

# What is there after a crash at each moment: debits, bookings in the ledger, credits.
LEFT = {
    "after-debit": (1, 0, 0),
    "during-ledger": (1, 1, 0),
    "after-ledger": (1, 1, 0),
    "before-effect": (1, 1, 0),
    "after-effect": (1, 1, 0),
    "after-commit": (1, 1, 1),
}
ALL_OF_IT = (1, 1, 1)


def made(api: Api, server: Server, order: Order) -> tuple[int, int, int]:
    """How often each part of a transfer was made: debit, booking in the ledger, credit."""
    (debits, credited), (_, booked) = api.postings(order), server.bookings(order)
    assert api.effects(order) == credited
    return debits, booked, credited


def test_a_retry_makes_no_part_of_a_transfer_again(api: Api, server: Server) -> None:
    """The ledger is called once, and each part is there once, however often it is retried."""
    order = Order()

    first, *retries = [api.send(TRANSFERS, order) for _ in range(3)]

    assert {retry.content for retry in retries} == {first.content}
    assert made(api, server, order) == ALL_OF_IT
    assert server.bookings(order) == (1, 1)


def test_a_transfer_is_resumed_behind_its_last_step(
    api: Api, server: Server, database: Database
) -> None:
    """Whichever moment a process is killed at, a retry makes what is missing, and only that."""
    crashed = {moment: Order() for moment in LEFT}
    left = {}
    for moment, order in crashed.items():
        api.killed(TRANSFERS, order, moment)
        database.wait_until_idle()
        left[moment] = made(api, server, order)
    assert left == LEFT

    with ThreadPoolExecutor(len(crashed)) as pool:
        retry = pool.map(lambda order: api.send_until_done(TRANSFERS, order), crashed.values())
        resumed = dict(zip(crashed, retry, strict=True))

    for moment, order in crashed.items():
        assert resumed[moment].status_code == 201
        assert "Idempotent-Replayed" not in resumed[moment].headers
        replay = api.send(TRANSFERS, order)
        assert replay.headers["Idempotent-Replayed"] == "true"
        assert replay.content == resumed[moment].content
    assert {moment: made(api, server, order) for moment, order in crashed.items()} == dict.fromkeys(
        LEFT, ALL_OF_IT
    )


def test_the_ledger_is_called_again_only_where_its_response_was_lost(
    api: Api, server: Server
) -> None:
    """A call whose response was not stored is repeated under the same key, and booked once; one
    whose response was stored is not.
    """
    lost, stored = Order(), Order()
    api.killed(TRANSFERS, lost, "during-ledger")
    api.killed(TRANSFERS, stored, "after-ledger")

    for order in (lost, stored):
        assert api.send_until_done(TRANSFERS, order).status_code == 201

    assert server.bookings(lost) == (2, 1)
    assert server.bookings(stored) == (1, 1)
