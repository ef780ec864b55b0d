"""A database for the length of a run, on each of the servers that ``tests.provision`` started."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
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


@contextmanager
def postgres() -> Iterator[Database]:
    import psycopg  # not at the top: there is none when the tests run on psycopg2

    server, name = os.environ["TEST_POSTGRES_URL"], _new_name()
    with psycopg.connect(server, autocommit=True) as admin:

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
    import pymysql

    server, name = urlsplit(os.environ["TEST_MARIADB_URL"]), _new_name()
    with closing(
        pymysql.connect(
            host=server.hostname,
            port=server.port or 3306,
            user=unquote(server.username or ""),
            password=unquote(server.password or ""),
            autocommit=True,
        )
    ) as admin:

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
