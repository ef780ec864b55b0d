"""Two processes of one application whose clocks are twenty minutes apart."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from redis import Redis

from idempotency_django.engine.leases import RENEWED_AFTER
from idempotency_django.models import DatabaseNow, IdempotencyKey
from idempotency_django.stores.records import Record, Status
from idempotency_django.testing import eventually
from tests.faults.late_processes import PLACES, SCOPE, Place, Worker, place, started
from tests.support.nightly import few
from tests.support.shared import new_key

pytestmark = [pytest.mark.e2e, pytest.mark.django_db(transaction=True, databases="__all__")]

LEASE = 3.0
TTL = 300.0  # less than the clocks are wrong by
OFFSETS = ("+10m", "-10m")
LIBRARIES = [
    os.environ.get("TEST_FAKETIME_LIB", ""),
    *map(str, Path("/usr/lib").glob("*/faketime/libfaketime.so.1")),
    *map(str, Path("/usr/lib").glob("faketime/libfaketime.so.1")),
    "/usr/local/lib/faketime/libfaketime.so.1",
]


def wrong_clock(offset: str, *, monotonic: bool) -> dict[str, str]:
    """What makes a process believe in another time."""
    library = next((path for path in LIBRARIES if path and Path(path).exists()), None)
    if library is None:
        pytest.skip("libfaketime IS NOT INSTALLED, and TEST_FAKETIME_LIB names none")
    return {
        "LD_PRELOAD": library,
        "FAKETIME": offset,
        "FAKETIME_DONT_FAKE_MONOTONIC": "0" if monotonic else "1",
        "DONT_FAKE_MONOTONIC": "0" if monotonic else "1",
    }


@dataclass(frozen=True)
class Site:
    """A place, and the workers whose clocks are fast and slow."""

    at: Place
    workers: list[Worker]
    monotonic: bool


@pytest.fixture(scope="module", params=few([*PLACES, "postgres, monotonic"]))
def site(
    request: pytest.FixtureRequest, django_db_setup: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """Two workers at a place; on one of them, the clock that nobody sets is wrong as well."""
    name, _, monotonic = request.param.partition(", ")
    clocks = [wrong_clock(offset, monotonic=bool(monotonic)) for offset in OFFSETS]
    folder = tmp_path_factory.mktemp("clocks")
    with place(name) as at:
        pair = (at.worker(folder, environment=clock, lease=LEASE, ttl=TTL) for clock in clocks)
        with started(pair) as workers:
            yield Site(at, workers, bool(monotonic))


@pytest.fixture
def at(site: Site) -> Place:
    """The place."""
    return site.at


@pytest.fixture(params=few(["fast first", "slow first"]))
def pair(request: pytest.FixtureRequest, site: Site) -> list[Worker]:
    """An owner and a contender."""
    return site.workers if request.param == "fast first" else site.workers[::-1]


def record(at: Place, key: str) -> Record:
    """What the store holds."""
    found = at.store.get(key, SCOPE)
    assert found is not None
    return found


def times(at: Place, key: str) -> tuple[float, float, float]:
    """By the server's clock: how old a record is, and how long lease and life are since then."""
    if at.cache:
        with Redis.from_url(at.cache) as client:
            seconds, microseconds = client.time()
            fields = ("created", "lease", "expires")
            given = client.hmget(at.store.redis_key(key, SCOPE), fields)  # type: ignore[attr-defined]
            created, lease, expires = (float(value or 0) / 1000 for value in given)
            return seconds + microseconds / 1e6 - created, lease - created, expires - created
    rows = IdempotencyKey.objects.using(at.alias).annotate(now=DatabaseNow())
    row = rows.get(key=key)
    age, lease, life = (
        (moment - row.created_at).total_seconds()
        for moment in (row.now, row.lease_expires_at or row.created_at, row.expires_at)
    )
    return age, lease, life


def test_clocks_are_apart(site: Site) -> None:
    """The clocks of the processes are really wrong, by ten minutes each."""
    fast, slow = (each.do("clock") for each in site.workers)
    now = time.time()
    assert (fast["time"] - now) // 60 in (9, 10)
    assert (now - slow["time"]) // 60 in (9, 10)
    assert (fast["monotonic"] - slow["monotonic"] > 1000) is site.monotonic


def test_live_lease_is_respected(site: Site, at: Place, pair: list[Worker]) -> None:
    """Nobody takes over from an owner that renews its lease, for as long as it does."""
    if site.monotonic:
        pytest.skip("no thread wakes up in time where libfaketime fakes the monotonic clock")
    owner, contender = pair
    key, begun_at = new_key(), time.monotonic()
    owner.begin("post", at.path, key, "wait:handler")
    owner.tells("reached")
    longest = time.monotonic() - begun_at  # from the request to the claim
    age, lease, life = times(at, key)
    renewed = lease - LEASE  # when: where it was, before this looked
    assert (-0.01 <= renewed <= longest) or (LEASE * RENEWED_AFTER < renewed < age)
    assert -0.01 <= life - TTL <= longest
    tries = 0
    while times(at, key)[0] < 1.4 * LEASE:
        assert contender.do("post", at.path, key)["status"] == 409
        tries += 1
        time.sleep(0.02)  # or it would do nothing but this, many hundred times
    assert tries
    owner.go_on()
    first, retry = owner.tells("response"), contender.do("post", at.path, key)
    assert (first["status"], first["replayed"]) == (201, False)
    assert (retry["status"], retry["replayed"], retry["body"]) == (201, True, first["body"])
    assert record(at, key).attempt == 1
    assert at.done(key) == 1


def test_life_is_not_shortened(at: Place, pair: list[Worker]) -> None:
    """What one has stored lives as long as it should for the other, purges included."""
    key = new_key()
    assert pair[0].do("post", at.path, key)["status"] == 201
    age, _, life = times(at, key)
    assert TTL - 0.01 <= life <= TTL + age  # from the claim, or from the response
    for each in pair:
        said = each.do("command", "purge_idempotency_keys", "--verbosity", "1")
        assert "Purged 0 " in said["said"] or "Nothing to purge" in said["said"]
        assert each.do("post", at.path, key)["replayed"]
    assert at.done(key) == 1


def test_life_ends(at: Place, pair: list[Worker]) -> None:
    """When a life is over by the server's clock, it is over for both; a purge then takes it."""
    one, other = pair
    keys = [new_key(), new_key()]
    for key in keys:
        assert one.do("post", at.path, key)["status"] == 201
    end(at, keys)
    response = other.do("post", at.path, keys[0])
    assert (response["status"], response["replayed"]) == (201, False)
    # A provider has not forgotten the derived key, which is the same in every life.
    assert at.done(keys[0]) == (2 if at.is_database else 1)
    if at.is_database:
        for each, count in zip(pair, (1, 0), strict=True):
            assert f"Purged {count} " in each.do("command", "purge_idempotency_keys")["said"]
    found = [at.store.get(key, SCOPE) for key in keys]
    assert found[1] is None
    assert found[0] is not None
    assert found[0].status is Status.COMPLETED
    assert one.do("post", at.path, keys[0])["replayed"]


def end(at: Place, keys: list[str]) -> None:
    """Let their lives end a moment ago, by the server's clock."""
    if at.cache:
        with Redis.from_url(at.cache) as client:
            for key in keys:
                client.pexpire(at.store.redis_key(key, SCOPE), 1)  # type: ignore[attr-defined]
        eventually(lambda: not any(at.store.get(key, SCOPE) for key in keys))
        return
    past = DatabaseNow() - timedelta(milliseconds=1)
    rows = IdempotencyKey.objects.using(at.alias).filter(key__in=keys)
    rows.update(expires_at=past, purge_at=past)
