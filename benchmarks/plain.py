"""A plain function, protected by this package and by AWS Powertools: its cost and its promises."""

# the page says × and –
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

from django.db import connections

from benchmarks import models
from benchmarks.comparison import compare
from benchmarks.functions import (
    BARE,
    DATABASE,
    FENCED,
    LABELS,
    POWERTOOLS,
    REDIS,
    REFUSALS,
    SUCCESSOR,
    Order,
    create,
    made_by,
    protected,
)
from benchmarks.project import ORDER, new_key
from benchmarks.report import Section, Table
from benchmarks.site import Site

THREADS: Final = 50
SLEEP: Final = 0.5  # seconds that a duplicated call takes
LEASE: Final = 0.6  # seconds
LATE_AFTER: Final = 2  # leases
PATIENCE: Final = 30  # seconds

COST: Final = """\
What the view does as a plain function, without HTTP: {rounds} interleaved rounds of {calls}
calls."""

PROMISES: Final = """\
{threads} threads called a function with one key at the same moment, {races} times. Then an owner
worked for {late} leases, or was paused for as long, while another process called with the same key.
An effect is a committed row. [Powertools for AWS
Lambda](https://docs.aws.amazon.com/powertools/python/latest/) is set up as its documentation says,
with Redis. Lambda ends a function when its time is over, so Powertools meets no such owners
there."""


def measure(site: Site, rounds: int, calls: int, races: int, owners: int) -> Section:
    comparison = compare(site, "function", LABELS, (BARE,), rounds, calls)
    details = [
        COST.format(rounds=rounds, calls=calls),
        comparison.times("call"),
        comparison.efforts("call"),
    ]
    parts = [
        PROMISES.format(threads=THREADS, races=races, late=LATE_AFTER),
        _promises(races, owners),
    ]
    return Section("A plain function, beside Powertools", parts, details=details)


def _promises(races: int, owners: int) -> Table:
    table = Table(
        [
            "",
            f"{THREADS} at once: effects",
            "refused",
            "slow owner: effects",
            "paused owner: effects",
            "it returns the result of",
            "a retry gets the result of",
        ]
    )
    for variant in (BARE, DATABASE, FENCED, REDIS, POWERTOOLS):
        row = _race(variant, races)
        row += _owners(variant, owners) if variant not in (BARE, DATABASE) else ["–"] * 4
        table.add(LABELS[variant], *row)
    return table


def _race(variant: str, races: int) -> list[str]:
    """The effects per key, and how many calls of each race were refused."""

    def slowly(order: Order) -> dict[str, Any]:
        result = create(order)
        time.sleep(SLEEP)
        return result

    function = protected(variant, slowly)
    effects, refused = [], []
    for _ in range(races):
        key = new_key()
        outcomes = _at_once(lambda key=key: function(key, {**ORDER, "reference": key}))
        effects.append(_effects(key))
        refused.append(sum(outcome == "refused" for outcome in outcomes))
        assert set(outcomes) <= {"returned", "refused"}, Counter(outcomes)
    return [_span(effects), _span(refused)]


def _at_once(call: Callable[[], object]) -> list[str]:
    barrier = threading.Barrier(THREADS)

    def work(_: int) -> str:
        barrier.wait(PATIENCE)
        try:
            call()
        except REFUSALS:
            return "refused"
        except Exception as error:  # noqa: BLE001  # what it says is measured
            return repr(error)
        finally:
            connections.close_all()
        return "returned"

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(THREADS)))


def _owners(variant: str, count: int) -> list[str]:
    slow, paused, returned, stored = [], [], [], []
    with _owner(variant) as process:
        for _ in range(count):
            slow.append(_meet(process, variant, pause=False)[0])
            effects, told, kept = _meet(process, variant, pause=True)
            paused.append(effects)
            returned.append(told)
            stored.append(kept)
    return [_span(slow), _span(paused), _names(returned), _names(stored)]


@contextmanager
def _owner(variant: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "django", "late_owner", variant, str(LEASE)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert _told(process) == "ready"
            yield process
        finally:
            process.kill()


def _meet(process: subprocess.Popen[str], variant: str, *, pause: bool) -> tuple[int, str, str]:
    """Call with the key of an owner that takes longer than its lease.

    Returns how many effects there are at last, who made the result that the owner returned, and
    who made the one that a later call gets.
    """
    key = new_key()
    _tell(process, key)
    assert _told(process) == "running"
    if pause:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(LATE_AFTER * LEASE)
    _call_as_successor(variant, key)
    if pause:
        os.kill(process.pid, signal.SIGCONT)
    _tell(process, "go on")
    returned = _told(process)
    return _effects(key), returned, _call_as_successor(variant, key)


def _call_as_successor(variant: str, key: str) -> str:
    function = protected(variant, lambda order: made_by(SUCCESSOR, order))
    try:
        return str(function(key, {**ORDER, "reference": key})["maker"])
    except REFUSALS:
        return "nobody"


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _effects(key: str) -> int:
    return models.Order.objects.filter(reference=key).count()


def _span(numbers: Sequence[int]) -> str:
    lowest, highest = min(numbers), max(numbers)
    return str(lowest) if lowest == highest else f"{lowest}–{highest}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"{number} × {name}" for name, number in sorted(Counter(names).items()))
