"""Real processes that are paused through a rebalance, or killed: one effect for each offset."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from idempotency_django.contrib.messaging.models import StreamPosition
from idempotency_django.testing import PATIENCE
from tests.settings import ALIASES
from tests.support.outside import environment, running
from tests.support.shared import effect_counts

from .worker import OFFSETS

pytestmark = [pytest.mark.e2e, pytest.mark.django_db(transaction=True, databases="__all__")]

PAUSED = "billing/orders/0"


class Process:
    """One that reads streams."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def order(self, **order: Any) -> None:
        """Tell it what to do."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def reply(self) -> dict[str, Any]:
        """What it says next."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], PATIENCE)[0], "It says nothing."
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        return told

    def read(self, name: str, *offsets: int) -> dict[str, Any]:
        """Have it handle offsets, and wait for that."""
        self.order(do="read", name=name, offsets=offsets)
        return self.reply()

    def stopped(self) -> None:
        """Wait until it has stopped itself."""
        assert self.reply() == {"stopped": True}
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def go_on(self) -> dict[str, Any]:
        """Wake it up; what became of its order."""
        os.kill(self.process.pid, signal.SIGCONT)
        return self.reply()


@pytest.fixture(scope="module", params=sorted(ALIASES))
def using(request: pytest.FixtureRequest) -> str:
    """The alias of each database; all tests of one follow each other, with the same processes."""
    return ALIASES[request.param]


@pytest.fixture(scope="module")
def pair(using: str, django_db_setup: None) -> Iterator[list[Process]]:
    """Two processes on the database, which start at the same time."""
    command = ("-m", "tests.contrib.messaging.streams.worker")
    pipe, env = subprocess.PIPE, environment(using)
    with (
        running(*command, env=env, stdin=pipe, stdout=pipe) as one,
        running(*command, env=env, stdin=pipe, stdout=pipe) as other,
    ):
        yield [Process(one), Process(other)]


def once(name: str, *offsets: int) -> dict[str, int]:
    return {f"{name} {offset}": 1 for offset in offsets}


def test_paused_through_a_rebalance(using: str, pair: list[Process]) -> None:
    """An owner that sleeps while another one takes its stream wakes up, and commits nothing."""
    late, other = pair
    late.order(do="read", name=PAUSED, offsets=[*range(8)], stop="before", at=3)
    late.stopped()
    assert other.read(PAUSED, *range(6)) == {"epoch": 2, "position": 5, "error": ""}
    assert late.go_on() == {"epoch": 1, "position": 2, "error": "StreamFenced"}
    assert late.read(PAUSED, 6, 7)["error"] == "StreamFenced"
    assert other.read(PAUSED, 5, 6, 7)["position"] == 7
    assert effect_counts(using) == once(PAUSED, *range(8))


def test_killed_anywhere(using: str, pair: list[Process]) -> None:
    """Killed before or after any statement or commit: each offset has one effect in the end."""
    pair[0].order(do="fall", name="s")
    told = pair[0].reply()
    assert told["boundaries"] >= 2 * (3 + 3 * len(OFFSETS))  # claim, and each message
    names = [f"s-{fatal}" for fatal in range(told["boundaries"] + 1)]
    assert effect_counts(using) == {each: 1 for name in names for each in once(name, *OFFSETS)}
    rows = StreamPosition.objects.using(using)
    assert set(rows.values_list("position", flat=True)) == {OFFSETS[-1]}
    assert rows.count() == len(names)
