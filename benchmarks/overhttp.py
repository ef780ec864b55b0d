"""The variants behind gunicorn, asked by several clients at once."""

# the page says × and –
from __future__ import annotations

import http.client
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from statistics import median

from benchmarks.client import Client
from benchmarks.models import Order
from benchmarks.project import BARE, LABELS, SERVED, new_key
from benchmarks.report import Section, Table
from benchmarks.timing import Block, Sample, interleave
from tests.support.servers import free_port

WORKERS, THREADS = 2, 8
CONNECTIONS = 4
DUPLICATES = 50
SLEEP = 0.5  # seconds that the handler of a duplicated request takes
START_TIMEOUT = 60  # seconds

ONE_BY_ONE = f"""\
{WORKERS} worker processes with {THREADS} threads each, {CONNECTIONS} connections, {{rounds}}
interleaved rounds of {{requests}} requests. Refused are first requests with a new key:
django-idempotency-key has one lock for all keys."""

AT_ONCE = f"""\
{DUPLICATES} connections sent one request at the same moment, {{races}} times, to a handler that
takes {SLEEP} s:"""


@contextmanager
def server(variant: str) -> Iterator[int]:
    """The port of gunicorn processes that will serve a variant."""
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", f"benchmarks.wsgi:{variant}"]
    command += ["--bind", f"127.0.0.1:{port}", "--workers", str(WORKERS)]
    command += ["--threads", str(THREADS), "--keep-alive", "60", "--preload"]
    command += ["--log-level", "warning"]
    with subprocess.Popen(command) as process:
        try:
            yield port
        finally:
            process.terminate()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        with suppress(OSError), closing(http.client.HTTPConnection("127.0.0.1", port)) as server:
            server.request("GET", "/")
            server.getresponse()
            return
        time.sleep(0.05)
    raise TimeoutError("gunicorn did not start.")


def measure(rounds: int, requests: int, races: int) -> Section:
    with ExitStack() as servers:
        ports = {variant: servers.enter_context(server(variant)) for variant in SERVED}
        for port in ports.values():
            _wait_for(port)
        details = [
            ONE_BY_ONE.format(rounds=rounds, requests=requests),
            _one_by_one(ports, rounds, requests),
        ]
        parts = [AT_ONCE.format(races=races), _duplicates(ports, races)]
    return Section("Over gunicorn", parts, details=details)


def _one_by_one(ports: dict[str, int], rounds: int, requests: int) -> Table:
    with ExitStack() as clients:
        sources = {
            variant: _Source(clients.enter_context(closing(_client(variant, port))), requests)
            for variant, port in ports.items()
        }
        blocks: dict[str, Block] = {}
        for variant, source in sources.items():
            blocks[f"{variant} first"] = source.first
            if variant != BARE:
                blocks[f"{variant} replay"] = source.replays
        series = {name: measured.wall for name, measured in interleave(blocks, rounds).items()}
    bare = series[f"{BARE} first"]
    table = Table(["", "request", "median", "× bare (range)", "refused"])
    for name, one in series.items():
        variant, kind = name.split()
        ratio = "1.00" if one is bare else str(one.over(bare))
        refused = sources[variant].refused if kind == "first" else "–"
        table.add(LABELS[variant], kind, f"{one.milliseconds:.2f} ms", ratio, refused)
    return table


def _client(variant: str, port: int, connections: int = CONNECTIONS) -> Client:
    return Client(port, f"/{variant}/", connections)


class _Source:
    """Blocks of first requests to one server, and of replays of those that it did not refuse."""

    def __init__(self, client: Client, requests: int) -> None:
        self._client = client
        self._requests = requests
        self._keys: list[str] = []
        self._sent = self._refused = 0

    @property
    def refused(self) -> str:
        """The share of first requests that were refused although their keys were new."""
        return f"{self._refused / self._sent:.1%}"

    def first(self) -> list[Sample]:
        replies = self._client.share([new_key() for _ in range(self._requests)])
        done = [reply for reply in replies if reply.status == 201]
        self._sent += len(replies)
        self._refused += len(replies) - len(done)
        self._keys = [reply.key for reply in done]
        return [Sample(reply.seconds) for reply in done]

    def replays(self) -> list[Sample]:
        replies = self._client.share(self._keys)
        return [Sample(reply.seconds) for reply in replies if reply.status == 201]


def _duplicates(ports: dict[str, int], races: int) -> Table:
    table = Table(["", "effects per key", "responses", "last refusal after"])
    for variant, port in ports.items():
        statuses: Counter[int] = Counter()
        effects, last_refusals = [], []
        for _ in range(races):
            key = new_key()
            with closing(_client(variant, port, DUPLICATES)) as client:
                replies = client.at_once(key, f"?sleep={SLEEP}", key)
            statuses.update(reply.status for reply in replies)
            effects.append(Order.objects.filter(reference=key).count())
            last_refusals += [max((r.seconds for r in replies if r.status != 201), default=0)]
        responses = ", ".join(f"{number} × {status}" for status, number in sorted(statuses.items()))
        refused = f"{median(last_refusals):.2f} s" if any(last_refusals) else "–"
        table.add(LABELS[variant], _span(effects), responses, refused)
    return table


def _span(numbers: list[int]) -> str:
    lowest, highest = min(numbers), max(numbers)
    return str(lowest) if lowest == highest else f"{lowest}–{highest}"
