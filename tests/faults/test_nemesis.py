"""Whatever happens at random to workers, wires and servers: as many effects as keys.

``NEMESIS_SECONDS`` says how long ``make nightly`` goes on for each target, and ``NEMESIS_SEED``
which run it is.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from idempotency_django.testing import eventually
from tests.e2e import databases
from tests.e2e.databases import Database
from tests.support.nightly import few, sizes
from tests.support.redis_servers import client, command, valkey_at
from tests.support.servers import free_port

from .faulty_servers import Restartable, restartable_postgres
from .ledger import Ledger
from .nemesis import Campaign, Target, workers
from .recovery import DRF, LEASED, STEPPED, TRANSACTIONAL, Mode
from .state import State
from .wires import wire_to

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(0)]

SEED = int(os.environ.get("NEMESIS_SEED", "1"))

CACHED = "idempotency_django.contrib.cached.CachedStore"
REDIS = "idempotency_django.contrib.redis.RedisStore"

OUTSIDE = Mode("/outside/", ())
IN_DATABASE = (TRANSACTIONAL, DRF, LEASED, STEPPED, OUTSIDE)


def postgres(stack: ExitStack, folder: Path) -> Target:
    """The database store on PostgreSQL, whose administrator is impatient."""
    database = stack.enter_context(databases.postgres())
    admin = stack.enter_context(State(database))
    wire = stack.enter_context(wire_to(database.url))

    def end_sessions(_: random.Random) -> None:
        admin.all(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    faults = {"cut": wire.cut, "end sessions": end_sessions}
    return Target(database, {"DATABASE_URL": wire.url}, IN_DATABASE, faults)


def mariadb(stack: ExitStack, folder: Path) -> Target:
    """The same on MariaDB."""
    import pymysql

    database = stack.enter_context(databases.mariadb())
    admin = stack.enter_context(State(database))
    wire = stack.enter_context(wire_to(database.url))

    def end_sessions(_: random.Random) -> None:
        query = "SELECT id FROM information_schema.processlist WHERE db = DATABASE()"
        for (number,) in admin.all(f"{query} AND id <> CONNECTION_ID()"):
            try:
                admin.all(f"KILL {number}")
            except pymysql.err.OperationalError as error:
                if "Unknown thread id" not in str(error):  # it has ended by itself
                    raise

    faults = {"cut": wire.cut, "end sessions": end_sessions}
    return Target(database, {"DATABASE_URL": wire.url}, IN_DATABASE, faults)


def sqlite(stack: ExitStack, folder: Path) -> Target:
    """The same on SQLite, which nothing can cut off."""
    database = stack.enter_context(databases.sqlite(folder))
    return Target(database, {"DATABASE_URL": database.url}, IN_DATABASE, {})


def cached(stack: ExitStack, folder: Path) -> Target:
    """The database store behind a cache that crashes, too, and forgets everything."""
    target = postgres(stack, folder)
    url, faults = restartable_valkey(stack)
    settings = target.settings | {"STORE": CACHED, "REDIS_URL": url}
    return replace(target, settings=settings, faults={**target.faults, **faults})


def redis(stack: ExitStack, folder: Path) -> Target:
    """The Redis store on a server that crashes and has written down everything."""
    url, faults = restartable_valkey(stack, "--appendonly", "yes", "--appendfsync", "always")
    target = sqlite(stack, folder)
    settings = target.settings | {"STORE": REDIS, "REDIS_URL": url}
    return replace(target, settings=settings, works=(OUTSIDE,), faults=faults)


def restartable_valkey(stack: ExitStack, *options: str) -> tuple[str, dict[str, Any]]:
    """The URL of a server at the end of a wire, and what may happen to both."""
    port = free_port()
    server = stack.enter_context(valkey_at(port, *options))
    wire = stack.enter_context(wire_to(server.url))
    assert server.pid is not None
    crash = stack.enter_context(restarts(server.pid, port, options))
    return wire.url, {"cut Redis": wire.cut, "crash Redis": crash}


@contextmanager
def restarts(
    pid: int, port: int, options: Sequence[str]
) -> Iterator[Callable[[random.Random], None]]:
    """A way to crash that server, and to start it again as it was."""
    with client(port) as asked:
        again = command(port, asked.config_get("dir")["dir"], *options)
    running: list[subprocess.Popen[bytes]] = []

    def responses() -> bool:
        with client(port) as asked:
            try:
                return bool(asked.ping())
            except Exception:  # noqa: BLE001  # not yet, or still loading
                return False

    def crash(_: random.Random) -> None:
        if running:
            running[-1].kill()
            running[-1].wait()
        else:
            os.kill(pid, signal.SIGKILL)
        silent: Any = subprocess.DEVNULL
        running.append(subprocess.Popen(again, stdout=silent, stderr=silent))
        eventually(responses)

    try:
        yield crash
    finally:
        for each in running[-1:]:
            each.kill()
            each.wait()


TARGETS = {each.__name__: each for each in (postgres, mariadb, sqlite, cached, redis)}
NEEDS = {"cached": "postgres", "redis": ""}


@pytest.mark.parametrize("seconds", sizes(1, 10, "NEMESIS_SECONDS"))
@pytest.mark.parametrize("name", few(TARGETS))
def test_nemesis(name: str, seconds: int, tmp_path: Path, ledger: Ledger, log: Path) -> None:
    """However often workers are killed or paused, wires cut and servers restarted, and however
    clients retry: each key has its effects once, one response, and is not wedged.
    """
    needed = NEEDS.get(name, name)
    if needed and needed not in os.environ["TEST_DATABASES"].split(","):
        pytest.skip(f"{needed} is not among TEST_DATABASES, or not installed")
    if needed == "postgres" and os.environ.get("TEST_PSYCOPG") == "2":
        pytest.skip("the faults are provoked on psycopg 3")
    with ExitStack() as stack:
        target = TARGETS[name](stack, tmp_path)
        site = stack.enter_context(workers(target, ledger, log))
        campaign = Campaign(target, site.port, SEED)
        faults = {"kill": site.kill, "pause": site.pause, **target.faults}
        campaign.run(seconds, faults)
        campaign.assert_recovered(ledger)
    assert campaign.responses


@pytest.fixture(scope="module")
def server(postgres_wanted: None) -> Iterator[Restartable]:
    with restartable_postgres() as server:
        yield server


@pytest.mark.parametrize("seconds", sizes(2, 10, "NEMESIS_SECONDS"))
@pytest.mark.parametrize("atomic", ["", "1"], ids=["autocommit", "ATOMIC_REQUESTS"])
def test_postgres_crashes_under_load(
    server: Restartable, atomic: str, seconds: int, ledger: Ledger, log: Path
) -> None:
    """The same holds however often PostgreSQL crashes and comes back."""
    settings = {"DATABASE_URL": server.url, "ATOMIC_REQUESTS": atomic}
    works = IN_DATABASE[:1] if atomic else IN_DATABASE  # leases need transactions of their own
    faults = {"crash": lambda _: server.crash_and_restart()}
    target = Target(Database("postgres", server.url, lambda: 0), settings, works, faults)
    with workers(target, ledger, log) as site:
        campaign = Campaign(target, site.port, SEED)
        campaign.run(seconds, target.faults)
        campaign.assert_recovered(ledger)
    assert campaign.told["crash"]
    assert campaign.told["executed"]
