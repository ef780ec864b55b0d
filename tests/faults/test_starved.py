"""A heartbeat that is starved beyond the lease, and one that is healthy for many of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connections

from tests.faults.late_processes import (
    PLACES,
    Place,
    Worker,
    place,
    started,
)
from tests.support.nightly import few, nightly
from tests.support.shared import new_key

pytestmark = [pytest.mark.e2e, pytest.mark.django_db(transaction=True, databases="__all__")]

LEASE = 1.5
LONGER = 6.0
"""Of owners whose heartbeat is to come in time, on a slow machine too."""
LEASES = 2
PAUSE = 0.02
"""Between two tries of a contender, all of which are refused at once."""


@pytest.fixture(scope="module", params=few(PLACES))
def at(request: pytest.FixtureRequest, django_db_setup: None) -> Iterator[Place]:
    """A place to keep records at."""
    with place(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def workers(at: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """An owner and a contender."""
    folder = tmp_path_factory.mktemp("starved")
    with started(at.worker(folder, lease=LEASE) for _ in range(2)) as workers:
        yield workers


@pytest.fixture(scope="module")
def healthy(at: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """The same, with leases that only a heartbeat that is starved on purpose lets end."""
    folder = tmp_path_factory.mktemp("healthy")
    with started(at.worker(folder, lease=LONGER) for _ in range(2)) as workers:
        yield workers


def assert_superseded(at: Place, late: dict[str, Any], successor: dict[str, Any], key: str) -> None:
    """The late owner changed nothing, and its client got the successor's response."""
    assert not any(late["seen"].values()), late["seen"]
    assert (successor["status"], successor["replayed"]) == (201, False)
    assert (late["status"], late["replayed"], late["body"]) == (201, True, successor["body"])
    assert json.loads(late["body"])["attempt"] == 2
    assert at.done(key) == 1


@pytest.mark.parametrize("pause", [5 * PAUSE, nightly(PAUSE)])
def test_healthy_heartbeat_keeps_a_long_handler(
    at: Place, healthy: list[Worker], pause: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through several leases a running owner is never taken over, though others always try."""
    owner, contender = healthy
    key, path = new_key(), at.path
    owner.begin("post", path, key, "wait:handler")
    owner.tells("reached")
    told = contender.do("traffic", path, [key], LEASES * LONGER, 4, pause=pause)
    owner.go_on()
    first, retry = owner.tells("response"), contender.do("post", path, key)
    assert set(told) == {"409"}, told
    assert (first["status"], first["replayed"]) == (201, False), first
    assert json.loads(first["body"])["attempt"] == 1
    assert (retry["replayed"], retry["body"]) == (True, first["body"])
    assert at.done(key) == 1
    with capsys.disabled():
        print(f"\n{at.name}: {LEASES} leases long, {told['409']} tries to take over, 0 succeeded")


# The heartbeat's own connection.


@contextmanager
def refused_connections(alias: str) -> Iterator[None]:
    """The database accepts no new connection; those that are there stay."""
    connections[alias].ensure_connection()  # the test goes on looking
    name = connections[alias].settings_dict["NAME"]
    server = os.environ["TEST_POSTGRES_URL"]
    import psycopg  # not at the top: there is none when the tests run on psycopg2

    with psycopg.connect(server, autocommit=True) as administrator:
        administrator.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        try:
            yield
        finally:
            administrator.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')


def connected(workers: list[Worker]) -> list[Worker]:
    """Workers that have a connection for their requests."""
    pytest.importorskip("psycopg", reason="the connections are refused by psycopg 3")
    for each in workers:
        assert each.do("post", "/leased/atomic/", new_key())["status"] == 201
    return workers


on_postgres = pytest.mark.parametrize("at", ["postgres"], indirect=True, scope="module")


@on_postgres
def test_heartbeat_without_a_connection(at: Place, workers: list[Worker]) -> None:
    """An owner whose heartbeat cannot connect says so, is taken over, and is late."""
    owner, contender = connected(workers)
    key, path = new_key(), at.path
    with refused_connections(at.alias):
        owner.begin("post", path, key, "wait:handler")
        owner.tells("reached")
        successor = contender.post_until(201, path, key)
    owner.go_on()
    assert_superseded(at, owner.tells("response"), successor, key)
    assert "could not be renewed; trying again" in owner.log.read_text()
