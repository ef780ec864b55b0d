"""Servers that a test may restart, or put before another one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

import pytest

from tests.e2e.databases import Database
from tests.support import servers
from tests.support.guard import Order

POOL = 5  # connections to PostgreSQL, fewer than there are clients


class Restartable:
    """A PostgreSQL server; nothing is in it but what its tests put there."""

    def __init__(self, url: str) -> None:
        import psycopg  # not at the top: there is none when the tests run on psycopg2

        self.url = url
        with psycopg.connect(url) as connection:
            [(self._data,)] = connection.execute("SHOW data_directory")
            [(programs,)] = connection.execute("SELECT setting FROM pg_config WHERE name='BINDIR'")
        self._command = [f"{programs}/pg_ctl", "-D", self._data, "-m", "immediate", "-s", "-w"]
        self._runs = True

    def crash_and_restart(self) -> None:
        """Stop it as a crash would, and return when it has recovered and takes connections."""
        self._run("-l", f"{self._data}/log", "restart")

    def stop(self) -> None:
        """Stop it, unless it is stopped."""
        if self._runs:
            self._run("stop")
            self._runs = False

    def _run(self, *what: str) -> None:
        subprocess.run(
            [*self._command, *what],
            check=True,
            cwd="/",
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
            **servers._account(),
        )


@contextmanager
def restartable_postgres() -> Iterator[Restartable]:
    """A server that is the test's own, durable as in production.

    Restarted, it is no child of the guard any more; without its folder it ends by itself.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("TEST_POSTGRES_URL", raising=False)
        with servers.postgres(durable=True) as server:
            restartable = Restartable(server.url)
            try:
                yield restartable
            finally:
                restartable.stop()


@contextmanager
def pgbouncer(database: Database, program: str) -> Iterator[str]:
    """PgBouncer in transaction mode before the database; the URL that leads through it.

    Even a client that is alone is given one connection after the other.
    """
    at = urlsplit(database.url)
    name = at.path.strip("/")
    with servers._guard("pb") as (folder, guard):
        port = servers.free_port()
        (folder / "pgbouncer.ini").write_text(
            f"""
[databases]
{name} = host={at.hostname} port={at.port} user={at.username} password={unquote(at.password or "")}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {POOL}
min_pool_size = {POOL}
server_round_robin = 1
max_client_conn = 500
ignore_startup_parameters = extra_float_digits
"""
        )
        serve = [program, str(folder / "pgbouncer.ini")]
        order = Order([], serve, stop=signal.SIGINT, account=servers._account())
        through = at._replace(netloc=f"postgres@127.0.0.1:{port}", query="sslmode=disable")
        yield servers._start(folder, guard, order, through.geturl()).url


def find_pgbouncer() -> str | None:
    """The program, where it is installed; Debian puts it where not everybody looks."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    return shutil.which("pgbouncer", path=path)
