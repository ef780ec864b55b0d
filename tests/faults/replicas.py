"""A replica of a PostgreSQL server, which lags behind, and a router that sends reads to it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from idempotency_django.testing import eventually
from tests.support.guard import Order
from tests.support.servers import _account, _guard, _postgres_programs, _start, free_port


class ReadsFromReplica:
    """The router of a project that scales its reads."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        """Reads go to the replica."""
        return "replica"

    def db_for_write(self, model: Any, **hints: Any) -> str:
        """Writes go to the primary."""
        return "default"

    def allow_relation(self, *objects: Any, **hints: Any) -> bool:
        """Both hold the same rows."""
        return True

    def allow_migrate(self, alias: str, *arguments: Any, **hints: Any) -> bool:
        """The replica gets its tables from the primary."""
        return alias == "default"


@contextmanager
def replica_of(primary: str, *, delay: str) -> Iterator[str]:
    """The URL of a replica that applies each commit so long after it was made.

    Args:
        primary: the URL of a database on the server to copy, whose user may replicate it.
        delay: in PostgreSQL's words: ``5s``.
    """
    at = urlsplit(primary)
    with _guard("pr") as (folder, guard):
        account, port = _account(), free_port()
        programs, data = _postgres_programs(folder, account), f"{folder}/data"
        source = at._replace(scheme="postgresql", path="").geturl()
        copy = [f"{programs}/pg_basebackup", "-D", data, "-d", source, "--write-recovery-conf"]
        copy += ["--checkpoint=fast", "--wal-method=stream", "--no-sync"]
        serve = [f"{programs}/postgres", "-D", data, f"--port={port}", "--max-connections=300"]
        serve += ["--listen-addresses=127.0.0.1", "--unix-socket-directories=", "--fsync=off"]
        # Last: what was set by ALTER SYSTEM would lose against an option.
        configure = ["sh", "-c", f"echo recovery_min_apply_delay={delay} >> {data}/postgresql.conf"]
        url = at._replace(netloc=f"{at.netloc.rpartition(':')[0]}:{port}").geturl()
        _start(folder, guard, Order([copy, configure], serve, signal.SIGINT, account), url)
        _until_streaming(url)
        yield url


def _until_streaming(url: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:

        def streams() -> bool:
            row = connection.execute("SELECT status FROM pg_stat_wal_receiver").fetchone()
            return row is not None and row[0] == "streaming"

        eventually(streams)
