"""A nemesis, clients that do not give up, and what must hold when both are done.

The nemesis kills and pauses workers, cuts wires and restarts servers, at random but by a seed. The
clients send each operation until it gets a response, sometimes twice at once, and sometimes give up
early; what they left is sent again at the end. Then each key has had its effects exactly once.
"""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from idempotency_django.testing import PATIENCE
from tests.e2e.databases import Database

from .ledger import Ledger
from .processes import Caller, Ended, Order, a_process
from .recovery import Mode
from .state import State

LEASE = 0.5  # seconds
WORKERS, CLIENTS = 3, 6
LONGEST_PAUSE = 2 * LEASE
PATIENT, IMPATIENT = 3.0, 0.3
"""Seconds that a client waits for a response before it tries again, and those of its twin."""
FAILING, TWICE, GIVING_UP = 0.15, 0.2, 0.1
"""How likely it is that a request is to fail, is sent twice at once, or is not sent again."""
TEMPORARY = frozenset({0, 409, 500, 503})
"""Responses that are none; 0 is a connection that broke, or was silent for too long."""


@dataclass(frozen=True)
class Target:
    """What the nemesis is let loose on.

    Attributes:
        database: where the effects are.
        settings: for the workers, see :mod:`tests.faults.bank.settings`.
        works: what is asked of them.
        faults: what the nemesis may do besides killing and pausing workers, by name.
    """

    database: Database
    settings: dict[str, str]
    works: Sequence[Mode]
    faults: dict[str, Callable[[random.Random], object]]


class Workers:
    """The processes behind one port; whoever dies is replaced."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._process = process
        self.port = int(process.stdout.readline() or 0)
        assert self.port, "The workers did not start; the log says why."

    def kill(self, chance: random.Random) -> None:
        """End one of them."""
        self._befall(chance, None)

    def pause(self, chance: random.Random) -> None:
        """Pause one of them, with all threads, for a time that may be longer than its lease."""
        self._befall(chance, chance.uniform(0.1, LONGEST_PAUSE))

    def _befall(self, chance: random.Random, pause: float | None) -> None:
        assert self._process.stdin is not None
        fault = {"number": chance.randrange(WORKERS), "pause": pause}
        self._process.stdin.write(json.dumps(fault) + "\n")
        self._process.stdin.flush()


@contextmanager
def workers(target: Target, ledger: Ledger, log: Path) -> Iterator[Workers]:
    """Worker processes for the length of the block."""
    environment = {**target.settings, "LEASE_SECONDS": str(LEASE), "CONN_MAX_AGE": "600"}
    with a_process(f"prefork {WORKERS}", ledger.url, log, environment) as process:
        yield Workers(process)


@dataclass
class Campaign:
    """What was asked for, what the responses were, and what the nemesis did."""

    target: Target
    port: int
    seed: int
    orders: dict[Order, Mode] = field(default_factory=dict)
    responses: dict[Order, set[str]] = field(default_factory=dict)
    told: Counter[str] = field(default_factory=Counter)
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, seconds: float, faults: dict[str, Callable[[random.Random], object]]) -> None:
        """Let clients and nemesis loose for that long; raise what any of them raised."""
        with ThreadPoolExecutor(CLIENTS + 1) as threads:
            running = [threads.submit(self._client, number) for number in range(CLIENTS)]
            running.append(threads.submit(self._nemesis, faults))
            try:
                deadline = time.monotonic() + seconds
                while time.monotonic() < deadline and not any(each.done() for each in running):
                    self.over.wait(0.05)
            finally:
                self.over.set()
            for each in running:
                each.result(PATIENCE)

    def _nemesis(self, faults: dict[str, Callable[[random.Random], object]]) -> None:
        chance, names = random.Random(self.seed), sorted(faults)
        while not self.over.wait(chance.uniform(0.02, 0.3)):
            name = chance.choice(names)
            faults[name](chance)
            self.tell(name)
            self._until_done(CLIENTS)

    def _until_done(self, more: int) -> None:
        """Let so many more operations get a response, if that does not take long."""
        wanted, deadline = len(self.responses) + more, time.monotonic() + LEASE
        while len(self.responses) < wanted and time.monotonic() < deadline:
            if self.over.wait(0.01):
                return

    def _client(self, number: int) -> None:
        chance, caller = random.Random(f"{self.seed} {number}"), Caller(self.port, PATIENT)
        while not self.over.is_set():
            work = chance.choice(self.target.works)
            order = Order(work.path)
            with self.lock:
                self.orders[order] = work
            twin = Caller(self.port, IMPATIENT)
            while not self.over.is_set():
                failing = Order(work.path, order.reference, order.key, fails=True)
                sent = failing if chance.random() < FAILING else order
                if chance.random() < TWICE:
                    with ThreadPoolExecutor(1) as second:
                        other = second.submit(twin.send, sent)
                        responded = self.note(order, caller.send(sent))
                        responded = self.note(order, other.result(PATIENCE)) or responded
                else:
                    responded = self.note(order, caller.send(sent))
                if responded or chance.random() < GIVING_UP:
                    break
                time.sleep(chance.uniform(0.01, 0.1))  # a fairly polite client
            twin.close()
        caller.close()

    def note(self, order: Order, ended: Ended) -> bool:
        """Remember a response; whether it is one."""
        said = str(ended.status) if ended.status != 201 else "executed"
        self.tell("replayed" if ended.replayed else said)
        assert ended.status in {*TEMPORARY, 201}, (order, ended)
        if ended.status == 201:
            with self.lock:
                self.responses.setdefault(order, set()).add(ended.body)
        return ended.status == 201

    def tell(self, what: str) -> None:
        """Count something."""
        with self.lock:
            self.told[what] += 1

    def assert_recovered(self, ledger: Ledger) -> None:
        """Nothing is wedged: each key has a response, always the same, and had its effects once."""
        with ThreadPoolExecutor(CLIENTS) as threads:
            list(threads.map(self._complete, self.orders))
        with State(self.target.database) as state:
            for order, work in self.orders.items():
                done = (state.effects(order), ledger.bookings(order.reference)[1])
                assert done == (work.effects, 1), (self.seed, order, done)
                assert len(self.responses[order]) == 1, (self.seed, order, self.responses[order])

    def _complete(self, order: Order) -> None:
        """Send it until it gets a response, and then once more: a replay."""
        caller = Caller(self.port, PATIENCE)
        self._response_to(order, caller)
        again = self._response_to(order, caller)
        assert again.replayed, (self.seed, order, again)
        caller.close()

    def _response_to(self, order: Order, caller: Caller) -> Ended:
        deadline = time.monotonic() + PATIENCE
        while not self.note(order, ended := caller.send(order)):
            assert time.monotonic() < deadline, (self.seed, order, "is wedged", ended)
            time.sleep(0.02)
        return ended
