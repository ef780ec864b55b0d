"""Whatever happens at random to workers, wires and servers: as many effects as keys.

``NEMESIS_SECONDS`` says how long ``make nightly`` goes on for each target, and ``NEMESIS_SEED``
which run it is.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from idempotency_django.testing import eventually
from tests.e2e import databases
from tests.support.nightly import few, sizes
from tests.support.redis_servers import client, command, valkey_at
from tests.support.servers import free_port

from .faulty_servers import Restartable, restartable_postgres
from .ledger import Ledger
from .nemesis import Campaign, Target, Work, workers
from .wires import Wire, wire_to

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(0)]

SEED = int(os.environ.get("NEMESIS_SEED", "1"))

CACHED = "idempotency_django.contrib.cached.CachedStore"
REDIS = "idempotency_django.contrib.redis.RedisStore"

CHARGE, TRANSFER = ("charge",), ("credit", "debit")
IN_DATABASE = (
    Work("/transactional/", CHARGE),
    Work("/drf/", CHARGE),
    Work("/leased/", CHARGE),
    Work("/stepped/", TRANSFER),
    Work("/outside/", ()),
)
IN_REDIS = (Work("/outside/", ()),)
EFFECTS = "SELECT kind FROM bank_effect WHERE reference = "


def kinds(rows: Iterable[Any]) -> tuple[str, ...]:
    """The kinds of effects, in alphabetical order."""
    return tuple(sorted(kind for (kind,) in rows))


def through(url: str, wire: Wire) -> str:
    """The URL of the same thing at the other end of the wire."""
    at = urlsplit(url)
    login = f"{at.netloc.rpartition('@')[0]}@" if "@" in at.netloc else ""
    return at._replace(netloc=f"{login}127.0.0.1:{wire.port}").geturl()


def wired(stack: ExitStack, url: str) -> Wire:
    """A wire to what has that URL."""
    at = urlsplit(url)
    assert at.port is not None
    return stack.enter_context(wire_to(at.hostname or "", at.port))


def postgres(stack: ExitStack, folder: Path) -> Target:
    """The database store on PostgreSQL, whose administrator is impatient."""
    import psycopg  # not at the top: there is none when the tests run on psycopg2

    url = stack.enter_context(databases.postgres()).url
    wire = wired(stack, url)
    admin = stack.enter_context(psycopg.connect(url, autocommit=True))

    def effects(reference: str) -> tuple[str, ...]:
        return kinds(admin.execute(f"{EFFECTS}%s", [reference]))

    def end_sessions(_: random.Random) -> None:
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    faults = {"cut": wire.cut, "end sessions": end_sessions}
    return Target({"DATABASE_URL": through(url, wire)}, IN_DATABASE, faults, effects)


def mariadb(stack: ExitStack, folder: Path) -> Target:
    """The same on MariaDB."""
    import pymysql

    url = stack.enter_context(databases.mariadb()).url
    wire, at = wired(stack, url), urlsplit(url)
    login = {"user": unquote(at.username or ""), "password": unquote(at.password or "")}
    address = {"host": at.hostname, "port": at.port or 3306, "database": at.path.strip("/")}
    admin = stack.enter_context(closing(pymysql.connect(**address, **login, autocommit=True)))

    def ask(statement: str, *values: object) -> list[Any]:
        with admin.cursor() as cursor:
            cursor.execute(statement, values)
            return list(cursor.fetchall())

    def effects(reference: str) -> tuple[str, ...]:
        return kinds(ask(f"{EFFECTS}%s", reference))

    def end_sessions(_: random.Random) -> None:
        query = "SELECT id FROM information_schema.processlist WHERE db = DATABASE()"
        for (number,) in ask(f"{query} AND id <> CONNECTION_ID()"):
            try:
                ask(f"KILL {number}")
            except pymysql.err.OperationalError as error:
                if "Unknown thread id" not in str(error):  # it has ended by itself
                    raise

    faults = {"cut": wire.cut, "end sessions": end_sessions}
    return Target({"DATABASE_URL": through(url, wire)}, IN_DATABASE, faults, effects)


def sqlite_effects(path: Path) -> Callable[[str], tuple[str, ...]]:
    """Looks into a file."""

    def effects(reference: str) -> tuple[str, ...]:
        with closing(sqlite3.connect(path)) as connection:
            return kinds(connection.execute(f"{EFFECTS}?", [reference]))

    return effects


def sqlite(stack: ExitStack, folder: Path) -> Target:
    """The same on SQLite, which nothing can cut off."""
    path = folder / "bank.sqlite3"
    return Target({"DATABASE_URL": f"sqlite:///{path}"}, IN_DATABASE, {}, sqlite_effects(path))


def cached(stack: ExitStack, folder: Path) -> Target:
    """The database store behind a cache that crashes, too, and forgets everything."""
    target = postgres(stack, folder)
    url, faults = restartable_valkey(stack)
    settings = target.settings | {"STORE": CACHED, "REDIS_URL": url}
    return Target(settings, target.works, {**target.faults, **faults}, target.effects)


def redis(stack: ExitStack, folder: Path) -> Target:
    """The Redis store on a server that crashes and has written down everything."""
    url, faults = restartable_valkey(stack, "--appendonly", "yes", "--appendfsync", "always")
    path = folder / "bank.sqlite3"
    settings = {"DATABASE_URL": f"sqlite:///{path}", "STORE": REDIS, "REDIS_URL": url}
    return Target(settings, IN_REDIS, faults, sqlite_effects(path))


def restartable_valkey(stack: ExitStack, *options: str) -> tuple[str, dict[str, Any]]:
    """The URL of a server at the end of a wire, and what may happen to both."""
    port = free_port()
    server = stack.enter_context(valkey_at(port, *options))
    wire = wired(stack, server.url)
    assert server.pid is not None
    crash = stack.enter_context(restarts(server.pid, port, options))
    return through(server.url, wire), {"cut Redis": wire.cut, "crash Redis": crash}


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
    import psycopg  # not at the top: there is none when the tests run on psycopg2

    def effects(reference: str) -> tuple[str, ...]:
        with psycopg.connect(server.url) as connection:
            return kinds(connection.execute(f"{EFFECTS}%s", [reference]))

    settings = {"DATABASE_URL": server.url, "ATOMIC_REQUESTS": atomic}
    works = IN_DATABASE[:1] if atomic else IN_DATABASE  # leases need transactions of their own
    target = Target(settings, works, {"crash": lambda _: server.crash_and_restart()}, effects)
    with workers(target, ledger, log) as site:
        campaign = Campaign(target, site.port, SEED)
        campaign.run(seconds, target.faults)
        campaign.assert_recovered(ledger)
    assert campaign.told["crash"]
    assert campaign.told["executed"]
