"""A database for the length of a run, on each of the servers that ``tests.provision`` started."""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.machine import patience

PATIENCE = 60  # seconds


@dataclass(frozen=True)
class Database:
    """An empty database, the URL that leads to it, and a look at who is busy in it."""

    name: str
    url: str
    transactions: Callable[[], int]

    def wait_until_idle(self) -> None:
        """Return when no transaction is open: the server has noticed who died."""
        deadline = time.monotonic() + patience(PATIENCE)
        while self.transactions():
            if time.monotonic() > deadline:
                raise TimeoutError(f"A transaction stayed open in {self.name}.")
            time.sleep(0.005)


def connect(url: str) -> Any:
    """A connection to what has that URL, which sees at once what others commit."""
    at = urlsplit(url)
    name = at.path.removeprefix("/")
    match at.scheme:
        case "sqlite":
            return sqlite3.connect(name, isolation_level=None, timeout=20)
        case "mysql":
            import pymysql

            login = {"user": unquote(at.username or ""), "password": unquote(at.password or "")}
            place: dict[str, Any] = {"host": at.hostname, "port": at.port or 3306}
            return pymysql.connect(**place, **login, database=name or None, autocommit=True)
        case _:
            import psycopg  # not at the top: there is none when the tests run on psycopg2

            return psycopg.connect(url, autocommit=True)


@contextmanager
def postgres() -> Iterator[Database]:
    server, name = os.environ["TEST_POSTGRES_URL"], _new_name()
    with connect(server) as admin:

        def transactions() -> int:
            found = admin.execute(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = %s AND xact_start IS NOT NULL",
                [name],
            ).fetchone()
            return int(found[0]) if found else 0

        admin.execute(f'CREATE DATABASE "{name}"')
        try:
            yield Database("postgres", urlsplit(server)._replace(path=name).geturl(), transactions)
        finally:
            admin.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@contextmanager
def mariadb() -> Iterator[Database]:
    server, name = urlsplit(os.environ["TEST_MARIADB_URL"]), _new_name()
    with closing(connect(server.geturl())) as admin:

        def execute(statement: str) -> int:
            with admin.cursor() as cursor:
                cursor.execute(statement)
                row = cursor.fetchone()
            return int(row[0]) if row else 0

        def transactions() -> int:
            return execute(
                "SELECT count(*) FROM information_schema.innodb_trx "
                "JOIN information_schema.processlist ON id = trx_mysql_thread_id "
                f"WHERE db = '{name}'"
            )

        execute(f"CREATE DATABASE {name}")
        try:
            yield Database("mariadb", server._replace(path=f"/{name}").geturl(), transactions)
        finally:
            execute(f"DROP DATABASE {name}")


@contextmanager
def sqlite(folder: Path) -> Iterator[Database]:
    # The system drops the locks of a process before anybody can see that it is gone.
    yield Database("sqlite", f"sqlite:///{folder / 'e2e.sqlite3'}", lambda: 0)


def _new_name() -> str:
    return f"e2e_{secrets.token_hex(6)}"
