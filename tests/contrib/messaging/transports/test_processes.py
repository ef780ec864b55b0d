"""Processes of ``manage.py run_consumer`` that are killed, paused, stopped and cut off."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from idempotency_django.contrib.messaging import Event
from tests.support.machine import patience
from tests.support.nightly import few
from tests.support.outside import environment, running
from tests.support.shared import effect_counts

from .brokers import PATIENCE, SQS, Broker, Redis, await_that
from .conftest import SERVERS
from .consumers import AFTER, WITHIN, started

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.django_db(transaction=True, databases="__all__"),
]

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes that consume from a place at a broker."""
    with ExitStack() as stack:

        def run(
            broker: Broker, name: str = "default", environment: Any = environment
        ) -> subprocess.Popen[str]:
            words = [f"--option={name}={value}" for name, value in broker.options.items()]
            log = stack.enter_context((tmp_path / "log").open("a"))
            return stack.enter_context(
                running(
                    *(
                        "-m",
                        "django",
                        "run_consumer",
                        "billing",
                    ),
                    *("--url", broker.url, "--from", broker.place),
                    *("--health", str(tmp_path / "health"), *words),
                    env={
                        **(environment(name) if callable(environment) else environment),
                        "DJANGO_SETTINGS_MODULE": f"{__package__}.process_settings",
                    },
                    stdout=log,
                    stderr=log,
                )
            )

        yield run


def paid(folder: Path, number: str, **data: Any) -> Event:
    """An event, as its sender makes it."""
    data = {"folder": str(folder), **data}
    return Event(id=number, source="/shop", type="order.paid", data=data)


def ends(process: subprocess.Popen[str]) -> int:
    """Its exit code, once it has ended."""
    return process.wait(patience(PATIENCE))


@pytest.mark.parametrize("broker", few(SERVERS), indirect=True)
def test_killed_and_stopped(broker: Broker, start: Start, tmp_path: Path) -> None:
    """Killed within the handler, and between commit and acknowledgement: one effect each.

    One that gets SIGTERM finishes the message in hand, acknowledges it, takes no other, and exits
    with 0.
    """
    broker.publish(paid(tmp_path, "a"), paid(tmp_path, "w", strike=WITHIN))
    broker.publish(paid(tmp_path, "c", strike=AFTER))
    assert [ends(start(broker)) for _ in range(2)] == [-signal.SIGKILL] * 2
    last = start(broker)
    # Some hide for a while what the killed had in hand, and go on with the rest.
    hides = isinstance(broker, SQS | Redis)
    await_that(lambda: effect_counts()["w"] == 1 and not (hides and broker.left()))
    broker.publish(paid(tmp_path, "slow", until="go"), paid(tmp_path, "next"))
    await_that(lambda: "slow" in started(tmp_path))
    last.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert ends(last) == 0
    assert effect_counts() == dict.fromkeys(["a", "w", "c", "slow"], 1)
    assert Counter(started(tmp_path)) == {"a": 1, "w": 2, "c": 1, "slow": 1}
    assert broker.left() == 1
    assert (tmp_path / "health").exists()


def alias(name: str) -> str:
    """The alias of a database, if it is there."""
    if name not in settings.ALIASES:
        pytest.skip(f"{name} is not among TEST_DATABASES")
    return str(settings.ALIASES[name])


@pytest.mark.nightly
def test_paused_through_a_rebalance(place: Any, start: Start, tmp_path: Path) -> None:
    """Kafka gives the partition of a paused process to another; late, the first commits nothing."""
    name, broker = alias("postgres"), place("kafka")
    broker.publish(paid(tmp_path, "a", until="go"), paid(tmp_path, "b"))
    first = start(broker, name)
    await_that(lambda: bool(started(tmp_path)))
    second = start(broker, name)
    first.send_signal(signal.SIGSTOP)
    await_that(lambda: len(effect_counts(name)) == 2)
    first.send_signal(signal.SIGCONT)
    (tmp_path / "go").touch()
    broker.publish(*(paid(tmp_path, str(number)) for number in range(10)))
    await_that(lambda: len(effect_counts(name)) == 12)
    for process in (first, second):
        process.send_signal(signal.SIGTERM)
        assert ends(process) == 0
    assert set(effect_counts(name).values()) == {1}
    assert max(Counter(started(tmp_path)).values()) == 2
    assert broker.left() == 0
