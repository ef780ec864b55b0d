"""A real streaming replica that lags behind, and a router that sends reads to it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import dj_database_url
import pytest

from tests.e2e import databases
from tests.faults.late_processes import Worker, started, worker
from tests.faults.replicas import replica_of
from tests.support.nightly import few, sizes
from tests.support.shared import new_key

pytestmark = pytest.mark.e2e

DELAY = "1h"  # the tests decide when it catches up
PATHS = ("/transactional/", "/leased/atomic/", "/leased/steps/")


@dataclass(frozen=True)
class Site:
    """A primary, its replica, and two workers that read from the one and write to the other."""

    primary: Any
    workers: list[Worker]

    def ask(self, question: str, *parameters: object) -> Any:
        """One value from the primary."""
        row = self.primary.execute(question, parameters).fetchone()
        return row and row[0]

    def effects(self, reference: str) -> int:
        """How often something was really done."""
        return int(self.ask("SELECT count(*) FROM tests_effect WHERE reference = %s", reference))

    def lags(self, key: str) -> bool:
        """Whether the application sees nothing of a key where it reads."""
        seen = self.workers[0].do("read", key)
        assert seen.pop("database") == "replica"
        return seen == {"effects": 0, "records": 0}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The site, whose administrator the replica knows."""
    if "postgres" not in os.environ["TEST_DATABASES"].split(","):
        pytest.skip("postgres is not among TEST_DATABASES")
    psycopg = pytest.importorskip("psycopg", reason="the replica is made with psycopg 3")
    folder = tmp_path_factory.mktemp("replica")
    with databases.postgres() as database, psycopg.connect(database.url, autocommit=True) as asked:
        parsed = dict(dj_database_url.parse(database.url))
        environment = os.environ | {"TEST_DATABASE": json.dumps(parsed)}
        with started([worker(dict(environment), folder)]) as [first]:
            first.do("command", "migrate", run_syncdb=True, verbosity=0)
            name = {"username": "chief", "email": ""}
            first.do("command", "createsuperuser", interactive=False, verbosity=0, **name)
        with replica_of(database.url, delay=DELAY) as replica:
            reads = dict(dj_database_url.parse(replica))
            pair = [worker(dict(environment), folder, replica=reads) for _ in range(2)]
            with started(pair) as workers:
                yield Site(asked, workers)


@pytest.mark.parametrize("path", few(PATHS))
def test_retry_is_replayed_at_once(site: Site, path: str) -> None:
    """The retry is served by the primary, while the replica knows nothing of the first."""
    key, [one, other] = new_key(), site.workers
    first = one.do("post", path, key)
    assert (first["status"], first["replayed"]) == (201, False), first
    for each in (other, one):
        retry = each.do("post", path, key)
        assert (retry["status"], retry["replayed"]) == (201, True), retry
        assert retry["body"] == first["body"]
    assert site.effects(key) == 1
    assert site.lags(key)


@pytest.mark.parametrize("rounds", sizes(3, 10))
@pytest.mark.parametrize("path", few(PATHS))
def test_duplicates_have_one_effect(site: Site, path: str, rounds: int) -> None:
    """Simultaneous duplicates in two processes have one effect, and all end in its response."""
    keys = [new_key() for _ in range(rounds)]
    said: list[int] = []
    for key in keys:
        for each in site.workers:
            each.begin("post", path, key)
        said += [each.tells("response")["status"] for each in site.workers]
        retries = [each.post_until(201, path, key) for each in site.workers]
        assert retries[0]["body"] == retries[1]["body"]
    assert set(said) <= {201, 409}
    assert [site.effects(key) for key in keys] == [1] * rounds
    assert all(site.lags(key) for key in keys)
