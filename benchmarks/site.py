"""Where the variants are measured: beside their servers, and a round trip away from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from benchmarks.timing import Block, Sample

LOCAL: Final = "local"
FAR: Final = "far"
DISTANCES: Final = LOCAL, FAR
ROUND_TRIP: Final = 0.0005  # seconds; between two machines of one data centre
PORTS: Final = {"BENCH_DATABASE_URL": 5432, "BENCH_REDIS_URL": 6379}
"""Which server is meant by which variable, and where it listens if its URL does not say."""
COUNTED_OVER: Final = 25  # calls


@dataclass(frozen=True)
class Traffic:
    """What the application sent to a server: messages that it awaited replies to, and bytes."""

    messages: float
    bytes: float


class Probe(NamedTuple):
    """The seconds of a round trip to each server."""

    database: float
    redis: float


@dataclass(frozen=True)
class Counts:
    """What one call makes."""

    commits: float
    database: Traffic
    redis: Traffic


class Process:
    """A process that replies to each line of JSON with another one."""

    def __init__(self, *command: str, urls: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._name = " ".join(command)
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=pipe,
            stdout=pipe,
            text=True,
            env={**os.environ, **urls},
        )

    def ask(self, question: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.reply()

    def reply(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        raise RuntimeError(f"`python -m {self._name}` ended; what it printed says why.")

    def close(self) -> None:
        self._process.communicate()


class Site:
    """A worker beside the servers, and one that reaches them by the relay."""

    def __init__(self, workers: Mapping[str, Process], relay: Process) -> None:
        self._workers = workers
        self._relay = relay

    def block(self, distance: str, of: str, variant: str, kind: str, calls: int) -> Block:
        """Calls of this variant of a view or function, first calls or their replays."""
        question = {"of": of, "variant": variant, "kind": kind, "calls": calls}
        return lambda: [Sample(*sample) for sample in self._workers[distance].ask(question)]

    def counts(self, of: str, variant: str, kind: str) -> Counts:
        """What one call of this kind makes, counted by the relay and by PostgreSQL."""
        first, replays = (
            self.block(FAR, of, variant, which, COUNTED_OVER) for which in ("first", "replay")
        )
        if kind == "replay":
            first()
        state, traffic = self._workers[FAR].ask("state"), self._relay.ask("traffic")
        (first if kind == "first" else replays)()
        sent = self._relay.ask("traffic")
        after = self._workers[FAR].ask("state")
        executed = after["orders"] - state["orders"]
        assert executed == (COUNTED_OVER if kind == "first" else 0), (variant, kind, executed)
        database, redis = map(_sent, traffic, sent)
        return Counts((after["commits"] - state["commits"]) / COUNTED_OVER, database, redis)

    def round_trips(self) -> dict[str, Probe]:
        """The seconds that the least message takes to each server and back, at each distance."""
        return {distance: Probe(*worker.ask("probe")) for distance, worker in self._workers.items()}


def _sent(before: dict[str, int], after: dict[str, int]) -> Traffic:
    return Traffic(*((after[name] - before[name]) / COUNTED_OVER for name in ("messages", "bytes")))


@contextmanager
def site() -> Iterator[Site]:
    """The relay and the workers, which end with this block."""
    with ExitStack() as running:

        def start(*command: str, urls: Mapping[str, str]) -> Process:
            process = Process(*command, urls=urls)
            running.callback(process.close)
            return process

        near = {name: os.environ[name] for name in PORTS}
        servers = [_address(name, url) for name, url in near.items()]
        relay = start("benchmarks.relay", str(ROUND_TRIP / 2), *servers, urls={})
        ports = relay.reply()
        far = {
            name: _moved(url, port) for (name, url), port in zip(near.items(), ports, strict=True)
        }
        workers = {
            distance: start("django", "worker", urls=urls)
            for distance, urls in {LOCAL: near, FAR: far}.items()
        }
        yield Site(workers, relay)


def _address(name: str, url: str) -> str:
    at = urlsplit(url)
    return f"{at.hostname}:{at.port or PORTS[name]}"


def _moved(url: str, port: int) -> str:
    """The URL of the same thing at another port of this machine."""
    at = urlsplit(url)
    login = f"{at.netloc.rpartition('@')[0]}@" if "@" in at.netloc else ""
    return at._replace(netloc=f"{login}127.0.0.1:{port}").geturl()
