"""A primary dies, and a replica takes over that had not received what was committed last."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dj_database_url
import pytest
from redis import Redis

from idempotency_django.testing import eventually
from tests.faults.faulty_servers import restartable_postgres
from tests.faults.late_processes import Worker, started, worker
from tests.faults.replicas import Replica, replica_of
from tests.servers import valkey
from tests.support import new_key

pytestmark = pytest.mark.e2e

TRANSACTIONAL, LEASED = "/transactional/", "/leased/atomic/"
BOUND, UNBOUND = 0, None  # the store's recheck
UNTIL_LONG_AFTER = 3600


@dataclass(frozen=True)
class Site:
    """What is there after the fail-over: a new primary, and two workers with each setting.

    Attributes:
        primary: the new one.
        cache: which has lost nothing.
        workers: by the store's ``recheck``; they had connections to the old primary.
        lost: for each setting, the keys whose effects only the old primary had, by their paths.
        kept: a key that the replica had received.
    """

    primary: Replica
    cache: Redis
    workers: dict[Any, list[Worker]]
    lost: dict[Any, dict[str, str]]
    kept: str

    def effects(self, reference: str) -> int:
        """How often something was really done, as the new primary knows."""
        return effects(self.primary, reference)


def effects(server: Replica, reference: str) -> int:
    """How often something was really done, as that server knows."""
    query = f"SELECT count(*) FROM tests_effect WHERE reference = '{reference}'"
    [(count,)] = server.execute(query)
    return int(count)


@pytest.fixture(scope="module")
def site(postgres_wanted: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The site, after everything was executed and replayed, and the primary crashed."""
    folder = tmp_path_factory.mktemp("failover")
    with ExitStack() as stack:
        primary = stack.enter_context(restartable_postgres())
        parsed = dict(dj_database_url.parse(primary.url))
        environment = {**os.environ, "TEST_DATABASES": "sqlite"}  # but for this one:
        environment["TEST_DATABASE"] = json.dumps(parsed)
        with started([worker(dict(environment), folder)]) as [first]:
            first.do("command", "migrate", run_syncdb=True, verbosity=0)
        replica = stack.enter_context(replica_of(primary.url, delay="0"))
        cache = stack.enter_context(valkey()).url
        environment["TEST_DATABASE"] = json.dumps(parsed | _whoever_writes(parsed, replica.url))
        workers = stack.enter_context(
            started(_worker(environment, folder, cache, bound) for bound in [BOUND] * 2 + [UNBOUND])
        )
        by_setting = {BOUND: workers[:2], UNBOUND: workers[2:]}
        kept = new_key()
        assert workers[0].do("post", TRANSACTIONAL, kept)["status"] == 201
        eventually(lambda: effects(replica, kept) == 1)
        replica.stop_receiving()
        lost = {setting: _executed_and_replayed(each) for setting, each in by_setting.items()}
        primary.stop()
        replica.promote()
        yield Site(replica, stack.enter_context(Redis.from_url(cache)), by_setting, lost, kept)


def _whoever_writes(primary: dict[str, Any], replica: str) -> dict[str, Any]:
    """How libpq finds the one of two servers that is the primary at the time."""
    both = [primary, dj_database_url.parse(replica)]
    where = {name: ",".join(str(each[name]) for each in both) for name in ("HOST", "PORT")}
    return {**where, "OPTIONS": {"target_session_attrs": "read-write"}}


def _worker(environment: dict[str, str], folder: Path, cache: str, recheck: int | None) -> Any:
    options = {"recheck": recheck, "max_age": UNTIL_LONG_AFTER, "prefix": f"{recheck}"}
    return worker(dict(environment), folder, store="cached", cache=cache, options=options)


def _executed_and_replayed(workers: list[Worker]) -> dict[str, str]:
    keys = {path: new_key() for path in (TRANSACTIONAL, LEASED)}
    for path, key in keys.items():
        assert workers[0].do("post", path, key)["status"] == 201
        for each in workers:
            assert each.do("post", path, key)["replayed"]
    return keys


def _answered(by: Worker, path: str, key: str) -> dict[str, Any]:
    """The answer to a client that retries: its first request may meet a connection that is dead."""
    answers: list[dict[str, Any]] = []

    def answered() -> bool:
        answers[:] = [by.do("post", path, key)]
        assert answers[0]["status"] in (201, 503), answers
        return bool(answers[0]["status"] == 201)

    eventually(answered)
    return answers[0]


@pytest.mark.parametrize("path", [TRANSACTIONAL, LEASED])
def test_what_the_database_lost_is_executed_again(site: Site, path: str) -> None:
    """An answer that the database has lost is not replayed from the cache: its effect is lost too.

    Executed again, it is cached again, for other processes as well.
    """
    [one, other], key = site.workers[BOUND], site.lost[BOUND][path]
    assert site.effects(key) == 0
    again = _answered(one, path, key)
    assert (again["replayed"], site.effects(key)) == (False, 1), again
    for each in (one, other):
        retry = _answered(each, path, key)
        assert (retry["replayed"], retry["body"]) == (True, again["body"])
    assert site.effects(key) == 1


def test_what_the_replica_had_is_replayed(site: Site) -> None:
    """An answer that was received before the fail-over is replayed after it."""
    for each in site.workers[BOUND]:
        assert _answered(each, TRANSACTIONAL, site.kept)["replayed"]
    assert site.effects(site.kept) == 1


def test_unbound_answers_outlive_their_effects(site: Site) -> None:
    """With ``recheck=None`` a lost answer is replayed without its effect until it leaves the cache.

    That is the danger which the documentation names, and clearing the cache ends it.
    """
    [one] = site.workers[UNBOUND]
    for path, key in site.lost[UNBOUND].items():
        assert _answered(one, path, key)["replayed"]
        assert site.effects(key) == 0
    site.cache.flushdb()
    for path, key in site.lost[UNBOUND].items():
        assert not _answered(one, path, key)["replayed"]
        assert site.effects(key) == 1
