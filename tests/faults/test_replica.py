"""A real streaming replica that lags behind, and a router that sends reads to it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dj_database_url
import pytest

from idempotency_django.testing import eventually
from tests.e2e import databases
from tests.faults.late_processes import Worker, started, worker
from tests.faults.replicas import Replica, replica_of
from tests.support.nightly import few, sizes
from tests.support.shared import new_key

pytestmark = pytest.mark.e2e

DELAY = "1h"  # the tests decide when it catches up
ADMIN = "/admin/idempotency_django/idempotencykey/"
PATHS = ("/transactional/", "/leased/atomic/", "/leased/steps/")


@dataclass(frozen=True)
class Site:
    """A primary, its replica, and two workers that read from the one and write to the other."""

    primary: Any
    replica: Replica
    workers: list[Worker]
    environment: dict[str, str]

    def ask(self, question: str, *parameters: object) -> Any:
        """One value from the primary."""
        row = self.primary.execute(question, parameters).fetchone()
        return row and row[0]

    def effects(self, reference: str) -> int:
        """How often something was really done."""
        return int(self.ask("SELECT count(*) FROM tests_effect WHERE reference = %s", reference))

    def record(self, key: str) -> int:
        """The number of a key's record; 0 where there is none."""
        return self.ask("SELECT id FROM idempotency_django_idempotencykey WHERE key = %s", key) or 0

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
            reads = dict(dj_database_url.parse(replica.url))
            pair = [worker(dict(environment), folder, replica=reads) for _ in range(2)]
            with started(pair) as workers:
                yield Site(asked, replica, workers, environment)


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
def test_duplicates_have_one_effect(
    site: Site, path: str, rounds: int, capsys: pytest.CaptureFixture[str]
) -> None:
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
    with capsys.disabled():
        print(f"\n{path}: {rounds} keys, twice each at once: {said.count(409)} told to wait")


@pytest.mark.nightly
def test_steps_are_resumed(site: Site) -> None:
    """A retry resumes behind the steps of the attempt that has just failed."""
    key, [one, other] = new_key(), site.workers
    assert one.do("post", "/leased/steps/", key, "fail:between")["status"] == 500
    retry = other.do("post", "/leased/steps/", key)
    assert (retry["status"], json.loads(retry["body"])["attempt"]) == (201, 2)
    assert [site.effects(name) for name in (f"1 {key}", key, f"3 {key}")] == [1, 1, 1]
    assert site.lags(key)


def test_running_operation_is_seen(site: Site) -> None:
    """A duplicate of what is running is told so, and gets its response when it has ended."""
    key, [one, other] = new_key(), site.workers
    one.begin("post", "/leased/atomic/", key, "wait:handler")
    one.tells("reached")
    assert other.do("post", "/leased/atomic/", key)["status"] == 409
    one.go_on()
    assert one.tells("response")["status"] == 201
    assert other.do("post", "/leased/atomic/", key)["replayed"]
    assert site.effects(key) == 1


@pytest.mark.nightly
def test_purge_goes_to_the_primary(site: Site) -> None:
    """What the replica has never seen is counted and purged, and what lives is not."""
    [one, other], keys = site.workers, [new_key() for _ in range(3)]
    for key in keys:
        assert one.do("post", "/leased/steps/", key)["status"] == 201
    past = "now() - interval '1 second'"
    site.primary.execute(
        f"UPDATE idempotency_django_idempotencykey SET expires_at = {past}, purge_at = {past} "
        "WHERE key = ANY(%s)",
        [keys[:2]],
    )
    said = other.do("command", "purge_idempotency_keys", "--dry-run")["said"]
    assert "Would purge 2 " in said
    assert "Purged 2 " in other.do("command", "purge_idempotency_keys")["said"]
    assert [bool(site.record(key)) for key in keys] == [False, False, True]
    steps = "SELECT count(*) FROM idempotency_django_idempotencystep WHERE record_id"
    orphans = f"{steps} NOT IN (SELECT id FROM idempotency_django_idempotencykey)"
    assert site.ask(orphans) == 0
    assert site.ask(f"{steps} = %s", site.record(keys[2])) == 3


@pytest.mark.nightly
def test_admin_shows_the_primary(site: Site) -> None:
    """The admin lists and shows a key at once, and asks the replica nothing about it."""
    key, one = new_key(), site.workers[0]
    assert one.do("post", "/leased/steps/", key)["status"] == 201
    one.do("login", "chief")
    for path in (ADMIN, f"{ADMIN}?q={key}", f"{ADMIN}{site.record(key)}/change/"):
        page = one.do("page", path)
        assert page["status"] == 200, page
        assert key in page["body"]
        assert [sql for sql in page["asked"] if "idempotency_django_" in sql] == []
        assert page["asked"], "The router was not asked."
    assert site.lags(key)


@pytest.mark.nightly
def test_store_on_the_replica(site: Site, tmp_path: Path) -> None:
    """A store that was put on the replica by mistake is refused, and executes nothing."""
    reads = dict(dj_database_url.parse(site.replica.url))
    wrong = worker(dict(site.environment), tmp_path, replica=reads, using="replica")
    with started([wrong]) as [mistaken]:
        said = mistaken.do("command", "check", databases=["default", "replica"])
        assert said["failed"]
        assert "idempotency_django.E005" in said["said"]
        assert "which is read-only, like a replica" in said["said"]
        key = new_key()
        for path in PATHS:
            assert mistaken.do("post", path, key)["status"] == 503
        assert site.effects(key) == 0


@pytest.mark.nightly
def test_replica_catches_up(site: Site) -> None:
    """When the replica has caught up it agrees, and nothing has happened twice."""
    key, [one, other] = new_key(), site.workers
    first = one.do("post", "/leased/atomic/", key)
    assert site.lags(key)
    site.replica.catch_up()
    eventually(lambda: not site.lags(key))
    assert other.do("read", key)["effects"] == site.effects(key) == 1
    retry = other.do("post", "/leased/atomic/", key)
    assert (retry["replayed"], retry["body"]) == (True, first["body"])
