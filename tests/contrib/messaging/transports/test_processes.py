"""Processes of ``manage.py run_consumer`` that are killed, paused, stopped and cut off."""

from __future__ import annotations

import os
import random
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
from idempotency_django.contrib.messaging.models import InboxMessage
from idempotency_django.models import IdempotencyKey
from tests.contrib.messaging.brokers import PATIENCE, Broker, Redis, await_that
from tests.contrib.messaging.conftest import CONSUMED
from tests.contrib.messaging.events import paid_in
from tests.support.machine import patience
from tests.support.nightly import few, first_database, sizes
from tests.support.outside import environment, running
from tests.support.shared import effect_counts

from .consumers import AFTER, ALWAYS, WITHIN, started

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.django_db(transaction=True, databases="__all__"),
]

Start = Callable[..., "subprocess.Popen[str]"]
SEED = int(os.environ.get("CONSUMER_SEED", "1"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts processes that consume from a place at a broker."""
    with ExitStack() as stack:

        def run(
            broker: Broker, alias: str = "default", *herd: str, **variables: str
        ) -> subprocess.Popen[str]:
            options = [f"--option={name}={value}" for name, value in broker.options.items()]
            place = ("--url", broker.url, "--from", broker.place)
            health = ("--health", str(tmp_path / "health"))
            variables["DJANGO_SETTINGS_MODULE"] = f"{__package__}.process_settings"
            log = stack.enter_context((tmp_path / "log").open("a"))
            module = ("tests.contrib.messaging.herd", *herd) if herd else ("django",)
            process = running(
                *("-m", *module, "run_consumer", "billing", *place, *health, *options),
                env=environment(alias, **variables),
                stdin=subprocess.PIPE if herd else None,
                stdout=log,
                stderr=log,
            )
            return stack.enter_context(process)

        yield run


def ends(process: subprocess.Popen[str]) -> int:
    """Its exit code, once it has ended."""
    return process.wait(patience(PATIENCE))


def dead(alias: str) -> set[str]:
    """The ids of the events that are dead letters, and whose records are held."""
    rows = InboxMessage.objects.using(alias).filter(source="consumer:billing", state="dead")
    letters = {Event.from_json(bytes(row.body)).id for row in rows}
    # After the letters: a record is held before its message is a dead letter.
    held = {row.key for row in IdempotencyKey.objects.using(alias).held()}
    assert letters <= held
    return held if len(letters) == len(held) else set()


@pytest.mark.parametrize("broker", few(CONSUMED), indirect=True)
def test_killed_and_stopped(broker: Broker, start: Start, tmp_path: Path) -> None:
    """Killed within the handler, and between commit and acknowledgement: one effect each.

    One that gets SIGTERM finishes the message in hand, acknowledges it, takes no other, and exits
    with 0.
    """
    broker.publish(paid_in(tmp_path, "a"), paid_in(tmp_path, "w", strike=WITHIN))
    broker.publish(paid_in(tmp_path, "c", strike=AFTER))
    assert [ends(start(broker)) for _ in range(2)] == [-signal.SIGKILL] * 2
    last = start(broker)
    # Redis hides for a while what the killed had in hand, and goes on with the rest.
    hides = isinstance(broker, Redis)
    await_that(lambda: effect_counts()["w"] == 1 and not (hides and broker.left()))
    broker.publish(paid_in(tmp_path, "slow", until="go"), paid_in(tmp_path, "next"))
    await_that(lambda: "slow" in started(tmp_path))
    last.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert ends(last) == 0
    assert effect_counts() == dict.fromkeys(["a", "w", "c", "slow"], 1)
    assert Counter(started(tmp_path)) == {"a": 1, "w": 2, "c": 1, "slow": 1}
    assert broker.left() == 1
    assert (tmp_path / "health").exists()


@first_database("name", indirect=False)
def test_poison_that_kills(place: Any, start: Start, name: str, tmp_path: Path) -> None:
    """What ends each process that handles it is counted, and dead-lettered."""
    broker, alias = place("rabbitmq"), settings.ALIASES[name]
    events = [
        paid_in(tmp_path, "a"),
        paid_in(tmp_path, "deadly", strike=ALWAYS),
        paid_in(tmp_path, "b"),
    ]
    broker.publish(*events)
    # The first time nobody can count it: that process had no reason to expect anything.
    for _ in range(3):
        assert ends(start(broker, alias, MAX_ATTEMPTS="2")) == -signal.SIGKILL
    start(broker, alias, MAX_ATTEMPTS="2")
    await_that(lambda: dead(alias) == {"deadly"} and len(effect_counts(alias)) == 2)
    assert effect_counts(alias) == {"a": 1, "b": 1}


@pytest.mark.parametrize("messages", sizes(48, 240, "CONSUMER_MESSAGES"))
@pytest.mark.parametrize("name", list(settings.ALIASES))
def test_storm(place: Any, start: Start, name: str, messages: int, tmp_path: Path) -> None:
    """Each message comes one to five times, in random order, to processes killed at random.

    There is one effect for each, and nothing is dead that is not poison.
    """
    broker, alias = place("rabbitmq"), settings.ALIASES[name]
    number = messages if name == "postgres" else messages // 8
    chance = random.Random(SEED)
    poison = {str(at) for at in chance.sample(range(number), max(1, number // 100))}
    ids = [str(at) for at in range(number)]
    copies = [each for each in ids for _ in range(chance.randint(1, 5))]
    chance.shuffle(copies)
    broker.publish(*(paid_in(tmp_path, each, poison=each in poison) for each in copies))
    with_effect = dict.fromkeys({*ids} - poison, 1)
    process = start(broker, alias, "4", str(max(8, number // 50)), str(SEED))
    await_that(lambda: len(effect_counts(alias)) == len(with_effect) and dead(alias) == poison)
    await_that(lambda: broker.waiting() == 0)
    process.stdin.close()  # type: ignore[union-attr]
    ends(process)
    assert effect_counts(alias) == with_effect
    assert dead(alias) == poison
