"""Starts the servers, makes a database, and runs the ``bench`` command on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psycopg
from django.core.management import execute_from_command_line

from tests.support.servers import postgres, valkey


@contextmanager
def database(server_url: str) -> Iterator[str]:
    """The URL of a database that exists as long as this block."""
    name = f"idempotency_bench_{os.getpid()}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        try:
            yield urlsplit(server_url)._replace(path=f"/{name}").geturl()
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def main() -> None:
    with (
        postgres(durable=True) as postgres_server,
        valkey() as valkey_server,
        database(postgres_server.url) as database_url,
    ):
        os.environ |= {
            "BENCH_DATABASE_URL": database_url,
            "BENCH_REDIS_URL": valkey_server.url,
            "BENCH_REDIS_VERSION": valkey_server.version,
            "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
        }
        execute_from_command_line(["python -m benchmarks", "bench", *sys.argv[1:]])


if __name__ == "__main__":
    main()
