"""Processes of ``manage.py run_consumer`` that are killed, paused, stopped and cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dj_database_url
import pytest
from django.conf import settings

from idempotency_django.contrib.messaging import Event
from tests.faults.faulty_servers import restartable_postgres
from tests.support.machine import patience
from tests.support.nightly import few
from tests.support.outside import ROOT, environment, running
from tests.support.servers import Server
from tests.support.shared import effect_counts

from .brokers import PATIENCE, SQS, Broker, RabbitMQ, Redis, await_that
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


@pytest.mark.nightly
def test_rebalanced_while_a_handler_runs(place: Any, start: Start, tmp_path: Path) -> None:
    """A second process of a Kafka group waits for the handler of the first, and then gets its
    share: one effect each.
    """
    broker = place("kafka", partitions=3)
    sent = ["a", "b"]
    broker.publish(paid(tmp_path, "a", until="go"), paid(tmp_path, "b"))
    first = start(broker)
    await_that(lambda: bool(started(tmp_path)))
    second = start(broker)
    (tmp_path / "go").touch()

    def are_shared() -> bool:
        if len(effect_counts()) == len(sent):
            sent.append(str(len(sent)))
            broker.publish(paid(tmp_path, sent[-1]))
        return len({line.split()[1] for line in lines(tmp_path)}) == 2

    await_that(are_shared)
    await_that(lambda: len(effect_counts()) == len(sent))
    for process in (first, second):
        process.send_signal(signal.SIGTERM)
        assert ends(process) == 0
    assert set(effect_counts().values()) == {1}
    assert broker.left() == 0


def lines(folder: Path) -> list[str]:
    """Which event was handled by which process."""
    return (folder / "starts").read_text().splitlines()


@pytest.mark.nightly
def test_the_database_restarts(rabbit: Server, start: Start, tmp_path: Path) -> None:
    """PostgreSQL crashes while messages are handled: one effect each, and none is given up."""
    if alias("postgres") and os.environ.get("TEST_PSYCOPG") == "2":
        pytest.skip("the faults are provoked on psycopg 3")
    numbers = [str(number) for number in range(60)]
    with restartable_postgres() as server:
        database = dj_database_url.parse(server.url)
        here = {"TEST_DATABASE": json.dumps(database), "TEST_POSTGRES_URL": server.url}
        subprocess.run(
            [sys.executable, "-m", "django", "migrate", "--run-syncdb", "-v0"],
            check=True,
            cwd=ROOT,
            env={**environment(), **here},
        )
        broker = RabbitMQ(rabbit)
        broker.publish(*(paid(tmp_path, number) for number in numbers))
        process = start(broker, environment={**environment(), **here})
        for done in (10, 30):
            await_that(lambda done=done: len(set(started(tmp_path))) >= done)
            server.crash_and_restart()
        await_that(lambda: len(set(started(tmp_path))) == len(numbers))
        process.send_signal(signal.SIGTERM)
        assert ends(process) == 0
        import psycopg  # there is none when the tests run on psycopg2

        with psycopg.connect(server.url) as connection:
            rows = connection.execute("SELECT reference FROM tests_effect").fetchall()
            [(dead,)] = connection.execute(
                "SELECT count(*) FROM idempotency_messaging_inboxmessage"
            ).fetchall()
    assert Counter(reference for (reference,) in rows) == dict.fromkeys(numbers, 1)
    assert (dead, broker.left()) == (0, 0)
    broker.close()
