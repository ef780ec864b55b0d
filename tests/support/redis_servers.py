"""Valkey servers that end and replicate, for the tests of the Redis store."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from idempotency_django.testing import eventually
from tests.support.guard import Order
from tests.support.servers import Server, _guard, _start, _valkey_program, free_port

HOST = "127.0.0.1"
PATIENT, SOON = 120_000, 1000
"""Milliseconds after which a silent server is given up by others: first so many that a machine
which is just slow takes nobody's place, and so few when a test wants a dead one replaced."""


@contextmanager
def valkey_at(port: int, *options: str) -> Iterator[Server]:
    """Valkey at that port, in memory only; its replicas know what it wrote without delay."""
    with _guard("vk") as (folder, guard):
        serve = command(port, str(folder), *options)
        yield _start(folder, guard, Order([], serve, signal.SIGTERM, {}), url(port))


def command(port: int, folder: str, *options: str) -> list[str]:
    """What starts such a server."""
    serve = [_valkey_program(), "--bind", HOST, "--port", str(port), "--dir", folder]
    return [*serve, "--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0", *options]


def url(port: int) -> str:
    """The address of a server at that port."""
    return f"redis://{HOST}:{port}/0"


def client(port: int) -> Redis:
    """A client of a server at that port, which reports a fault at once."""
    return Redis(host=HOST, port=port, socket_timeout=30, retry=Retry(NoBackoff(), 0))


@contextmanager
def replica_of(primary: int) -> Iterator[int]:
    """A replica that has caught up with the server at that port; its own port."""
    port = free_port()
    with valkey_at(port, "--replicaof", HOST, str(primary)):
        eventually(lambda: is_fed(primary, port))
        yield port


def is_fed(primary: int, replica: int) -> bool:
    """Whether both know that the replica has caught up, so that its word counts from now on.

    The replica says so first; the primary heeds it a moment later.
    """
    with client(primary) as feeds, client(replica) as fed:
        return _online(feeds) == 1 and fed.info("replication")["master_link_status"] == "up"


@contextmanager
def sentinel_of(primary: int, name: str) -> Iterator[int]:
    """A sentinel that watches the server at that port and knows its replica; its own port."""
    port = free_port()
    with _guard("vk") as (folder, guard):
        lines = ["bind 127.0.0.1", f"port {port}", f"sentinel monitor {name} {HOST} {primary} 1"]
        lines += [f"sentinel down-after-milliseconds {name} {PATIENT}"]
        # A fail-over that came to nothing is tried again after twice that time.
        lines += [f"sentinel failover-timeout {name} 10000"]
        (folder / "sentinel.conf").write_text("\n".join(lines))
        serve = [_valkey_program(), str(folder / "sentinel.conf"), "--sentinel"]
        yield _watching(_start(folder, guard, Order([], serve, signal.SIGTERM, {}), url(port)))


def give_up(sentinel: int, name: str) -> None:
    """Let the sentinel at that port replace what is dead."""
    with client(sentinel) as asked:
        asked.execute_command("SENTINEL", "SET", name, "down-after-milliseconds", SOON)


def _watching(server: Server) -> int:
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    with client(port) as asked:
        eventually(lambda: asked.info("sentinel")["master0"]["slaves"] == 1)
    return port


def _online(node: Redis) -> int:
    info = node.info("replication")
    states = [info.get(f"slave{number}", {}).get("state") for number in range(3)]
    return states.count("online")
