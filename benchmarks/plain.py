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

from aws_lambda_powertools.utilities.idempotency.exceptions import IdempotencyValidationError
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
    VALIDATED,
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
What the view does (validation, one INSERT, the result as a dict) as a plain function, without HTTP:
{rounds} interleaved rounds of {calls} calls. `idempotent_call` is given the order as its
fingerprint. [Powertools for AWS Lambda](https://docs.aws.amazon.com/powertools/python/latest/) is
set up as its documentation says: `@idempotent_function`, a `CachePersistenceLayer` with a client of
redis-py, the key by `event_key_jmespath`, and a registered context that says how much time is left.
It is not given the payload to compare: with `payload_validation_jmespath`, a second identical call
{validated}."""

PROMISES: Final = """\
{threads} threads called the function with one key at the same moment, {races} times; the function
takes {sleep} s. Then owners in a process of their own: a slow one, which works for {late} leases
(Powertools: for {late} times what its context said is left), and a paused one, which SIGSTOP holds
for as long and then lets go on. Meanwhile another process calls with the same key. The effect is a
row for each time that the function ran to its end and committed. Lambda ends a function when its
time is over, so Powertools meets no such owners there."""


def measure(site: Site, rounds: int, calls: int, races: int, owners: int) -> Section:
    comparison = compare(site, "function", LABELS, (BARE,), rounds, calls)
    parts = [
        COST.format(rounds=rounds, calls=calls, validated=_validated()),
        comparison.times("call"),
        comparison.efforts("call"),
        PROMISES.format(threads=THREADS, races=races, sleep=SLEEP, late=LATE_AFTER),
        _promises(races, owners),
    ]
    return Section("Around a plain function, beside Powertools", parts)


def _validated() -> str:
    """What a second identical call gets of Powertools, where the payload is to be compared."""
    function = protected(VALIDATED)
    key = new_key()
    first = function(key, ORDER)
    try:
        again = function(key, ORDER)
    except IdempotencyValidationError as error:
        return f"is refused ({type(error).__name__})"
    return "gets the first result" if again == first else "gets another result"


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
