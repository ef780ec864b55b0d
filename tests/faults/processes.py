"""The bank's processes, as the tests see them."""

from __future__ import annotations

import http.client
import json
import os
import select
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from idempotency_django.testing import PATIENCE
from testproject.ledger import end

from .boundaries import Strike

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Order:
    """One operation, whose retries all send the same; one that ``fails`` does so in the end."""

    path: str
    reference: str = field(default_factory=lambda: uuid.uuid4().hex)
    key: str = field(default_factory=lambda: str(uuid.uuid4()))
    fails: bool = False


@dataclass(frozen=True)
class Ended:
    """How a request ended: with a signal to its process, or with a response."""

    signal: int = 0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""
    passed: dict[str, list[str]] = field(default_factory=dict)

    @property
    def replayed(self) -> bool:
        return self.headers.get("Idempotent-Replayed") == "true"


class Forks:
    """Executes each order in a process of its own, one after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def send(self, order: Order, strike: Strike | None = None) -> Ended:
        """How it ended; with a strike, its process is killed at that boundary."""
        assert self._process.stdin is not None
        told = {**asdict(order), "strike": strike and asdict(strike)}
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(_line(self._process)))


Workers = Callable[[Mapping[str, str]], Forks]
"""Gives what executes orders with these variables."""


class Caller:
    """Sends orders over a connection that is kept until it breaks."""

    def __init__(self, port: int, patience: float = PATIENCE) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience)

    def send(self, order: Order) -> Ended:
        """The response; status 0 where there is none."""
        headers = {"Idempotency-Key": order.key, "X-Fail": str(order.fails)}
        headers["Content-Type"] = "application/json"
        try:
            body = json.dumps({"reference": order.reference})
            self._connection.request("POST", order.path, body, headers)
            response = self._connection.getresponse()
            ended = Ended(0, response.status, dict(response.headers), response.read().decode())
        except (OSError, http.client.HTTPException):
            self.close()
            return Ended()
        # A worker that is killed amid its headers; to the client of the library these are all.
        return ended if "Content-Length" in ended.headers else Ended()

    def close(self) -> None:
        """Hang up; the next order makes a new connection."""
        self._connection.close()


def migrate(url: str) -> None:
    """Make the bank's tables."""
    command = [sys.executable, "-m", "tests.faults.worker", "migrate"]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "DATABASE_URL": url})


@contextmanager
def forks(url: str, ledger: str, log: Path, **environment: str) -> Iterator[Forks]:
    """A process that forks, for the length of the block.

    Args:
        url: of the database.
        ledger: the ledger's URL.
        log: the file for what it says of itself; more than one process may write to it.
        environment: variables for it, see the bank's settings.
    """
    environment["DATABASE_URL"] = url
    with a_process("fork", ledger, log, environment) as process:
        assert _line(process) == "ready\n"
        yield Forks(process)


@contextmanager
def workers(url: str, ledger: str, log: Path) -> Iterator[Workers]:
    """One such process for each environment that is asked for: each of them loads all of Django."""
    made: dict[frozenset[tuple[str, str]], Forks] = {}
    with ExitStack() as stack:

        def with_environment(environment: Mapping[str, str]) -> Forks:
            name = frozenset(environment.items())
            if name not in made:
                made[name] = stack.enter_context(forks(url, ledger, log, **environment))
            return made[name]

        yield with_environment


@contextmanager
def site(url: str, ledger: str, log: Path, **environment: str) -> Iterator[int]:
    """The same for a process that serves HTTP, each connection in a thread of its own; its port."""
    environment["DATABASE_URL"] = url
    with a_process("serve", ledger, log, environment) as process:
        yield int(_line(process))


@contextmanager
def a_process(
    command: str, ledger: str, log: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A process of the bank, which ends with the block."""
    pipe: Any = subprocess.PIPE
    with (
        log.open("ab") as said,
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults.worker", *command.split()],
            cwd=ROOT,
            env={**os.environ, **environment, "LEDGER_URL": ledger},
            stdin=pipe,
            stdout=pipe,
            stderr=said,
            text=True,
            # The system hangs up on a group of processes when one of them is paused and who
            # started them ends.
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            end(process)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], PATIENCE * 2)
    line = process.stdout.readline() if readable else ""
    if not line:
        raise RuntimeError("A worker said nothing; its log says why.")
    return line
