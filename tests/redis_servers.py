"""Valkey servers that end, replicate and form clusters, for the tests of the Redis store."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry

from idempotency_django.testing import eventually
from tests.servers import Server, _guard, _Order, _start, _valkey_program, free_port

HOST = "127.0.0.1"
SLOTS = 16384
PATIENT, SOON = 120_000, 1000
"""Milliseconds after which a silent server is given up by others: first so many that a machine
which is just slow takes nobody's place, and so few when a test wants a dead one replaced."""


@contextmanager
def valkey_at(port: int, *options: str) -> Iterator[Server]:
    """Valkey at that port, in memory only; its replicas know what it wrote without delay."""
    with _guard("vk") as (folder, guard):
        serve = command(port, str(folder), *options)
        yield _start(folder, guard, _Order([], serve, signal.SIGTERM, {}), url(port))


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
        yield _watching(_start(folder, guard, _Order([], serve, signal.SIGTERM, {}), url(port)))


def give_up(sentinel: int, name: str) -> None:
    """Let the sentinel at that port replace what is dead."""
    with client(sentinel) as asked:
        asked.execute_command("SENTINEL", "SET", name, "down-after-milliseconds", SOON)


def _watching(server: Server) -> int:
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    with client(port) as asked:
        eventually(lambda: asked.info("sentinel")["master0"]["slaves"] == 1)
    return port


@dataclass(frozen=True)
class Cluster:
    """Three primaries and their three replicas: the pid of each by its port."""

    pids: dict[int, int]

    def client(self, **options: Any) -> RedisCluster:
        """A client of the cluster that reports a fault at once instead of trying on."""
        nodes = [ClusterNode(HOST, port) for port in self.pids]
        return RedisCluster(
            startup_nodes=nodes, socket_timeout=30, retry=Retry(NoBackoff(), 0), **options
        )

    def kill(self, port: int) -> None:
        """End one node as a crash would; nobody takes its place yet."""
        os.kill(self.pids[port], signal.SIGKILL)

    def give_up(self, dead: int) -> None:
        """Let a replica take the place of that node."""
        self._be_patient(SOON, dead)

    def be_patient(self, dead: int) -> None:
        """Let no other node be replaced."""
        self._be_patient(PATIENT, dead)

    def _be_patient(self, milliseconds: int, dead: int) -> None:
        for port in self.pids.keys() - {dead}:
            with client(port) as node:
                node.config_set("cluster-node-timeout", milliseconds)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster whose nodes all agree that it is whole."""
    with ExitStack() as stack:
        pids = {}
        for port in [free_port() for _ in range(6)]:
            server = stack.enter_context(valkey_at(port, *_cluster_options(free_port())))
            assert server.pid is not None
            pids[port] = server.pid
        with ExitStack() as asked:
            _form([asked.enter_context(client(port)) for port in pids], list(pids))
        yield Cluster(pids)


def _cluster_options(bus: int) -> list[str]:
    options = ["--cluster-enabled", "yes", "--cluster-port", str(bus)]
    options += ["--cluster-node-timeout", str(PATIENT)]
    options += ["--cluster-require-full-coverage", "no"]
    return [*options, "--cluster-replica-validity-factor", "0"]


def _form(nodes: list[Redis], ports: list[int]) -> None:
    buses = [int(node.config_get("cluster-port")["cluster-port"]) for node in nodes]
    for port, bus in zip(ports[1:], buses[1:], strict=True):
        nodes[0].execute_command("CLUSTER", "MEET", HOST, port, bus)
    for number, node in enumerate(nodes[:3]):
        first, last = number * SLOTS // 3, (number + 1) * SLOTS // 3 - 1
        node.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
    names = [_text(node.execute_command("CLUSTER", "MYID")) for node in nodes]
    # A node that another one has only heard of is among those it knows, under a made-up name.
    eventually(lambda: all(_known(node) == set(names) for node in nodes))
    for name, replica in zip(names[:3], nodes[3:], strict=True):
        replica.execute_command("CLUSTER", "REPLICATE", name)
    eventually(lambda: all(_is_whole(node) for node in nodes))
    for primary in nodes[:3]:
        eventually(lambda primary=primary: _online(primary) == 1)  # type: ignore[misc]


def _info(node: Redis) -> dict[str, str]:
    text = node.execute_command("CLUSTER", "INFO")
    if isinstance(text, dict):
        return {str(name): str(value) for name, value in text.items()}
    lines = text.decode().split("\r\n")
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _known(node: Redis) -> set[str]:
    """The names of the nodes that a node knows."""
    lines = _text(node.execute_command("CLUSTER", "NODES")).splitlines()
    return {line.split()[0] for line in lines}


def _text(answer: bytes | str) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer


def _is_whole(node: Redis) -> bool:
    info = _info(node)
    return info["cluster_state"] == "ok" and int(info["cluster_slots_ok"]) == SLOTS


def _online(node: Redis) -> int:
    info = node.info("replication")
    states = [info.get(f"slave{number}", {}).get("state") for number in range(3)]
    return states.count("online")
