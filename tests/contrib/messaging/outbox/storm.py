"""Writers and relays, some of them killed and paused, told what to do as JSON.

The first process loads everything and opens nothing. It forks the others, kills and pauses relays
at random, replaces those that it killed, and ends when all that was committed was sent.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import django

from tests.contrib.messaging.forks import forked

LEASE = 0.5  # seconds
BATCH = 20


@dataclass(frozen=True)
class Orders:
    """What the processes are told.

    Attributes:
        log: the broker: a file to which what arrives is appended.
        messages: how many transactions there are.
        groups: how many groups they publish to.
        writers: how many processes publish.
        relays: how many processes relay.
        refused: of how many messages the broker refuses one.
        strikes: how often a relay is killed or paused.
        seed: of the randomness.
    """

    log: str
    messages: int
    groups: int = 40
    writers: int = 6
    relays: int = 3
    refused: int = 100
    strikes: int = 20
    seed: int = 1


def write(orders: Orders, place: int) -> None:
    """Publish this writer's share; one of ten transactions is rolled back."""
    from django.db import OperationalError, transaction

    from idempotency_django.contrib.messaging import publish
    from tests.models import Effect

    chance = random.Random(f"{orders.seed} {place}")
    for number in range(place, orders.messages, orders.writers):
        group = f"g{chance.randrange(orders.groups)}"
        while True:
            try:
                with transaction.atomic():
                    Effect.objects.create(reference=f"committed {number}")
                    publish("orders", {"number": number}, type="order.paid", group=group)
                    transaction.set_rollback(chance.random() < 0.1)
            except OperationalError:  # SQLite is busy
                continue
            break


def relay() -> None:
    """Send what is due, with short leases and retries."""
    from idempotency_django.backoff import Backoff
    from idempotency_django.contrib.messaging import Relay
    from idempotency_django.contrib.messaging.loops import Part, run
    from idempotency_django.contrib.messaging.outbox import relay as batches

    batches.BACKOFF = Backoff(timedelta(seconds=0.02), timedelta(seconds=0.1))
    sender = Relay(batch_size=BATCH, lease=timedelta(seconds=LEASE))
    run([Part("relay", sender.work, timedelta(seconds=0.02))], threading.Event())


def waits() -> bool:
    """Whether something is not sent yet; a process of its own asks, and takes its connection."""

    def ask() -> None:
        from idempotency_django.contrib.messaging.models import OutboxMessage

        os._exit(10 if OutboxMessage.objects.exclude(state="done").exists() else 0)

    _, status = os.waitpid(forked(ask), 0)
    return os.waitstatus_to_exitcode(status) != 0


def supervise(orders: Orders) -> None:
    """Keep the relays at work, and strike them, until all is sent."""
    chance = random.Random(orders.seed)
    writers = {forked(lambda place=place: write(orders, place)) for place in range(orders.writers)}
    relays = [forked(relay) for _ in range(orders.relays)]
    paused: list[tuple[float, int]] = []
    strikes = orders.strikes
    while writers or strikes or waits():
        time.sleep(0.05)
        for writer in list(writers):
            ended, status = os.waitpid(writer, os.WNOHANG)
            if ended:
                assert os.waitstatus_to_exitcode(status) == 0
                writers.discard(writer)
        for until, process in list(paused):
            if time.monotonic() > until:
                paused.remove((until, process))
                os.kill(process, signal.SIGCONT)
        if strikes:
            strikes -= 1
            place = chance.randrange(len(relays))
            if any(process == relays[place] for _, process in paused):
                continue
            if chance.random() < 0.5:
                os.kill(relays[place], signal.SIGSTOP)
                paused.append((time.monotonic() + LEASE * 2 * chance.random(), relays[place]))
            else:
                os.kill(relays[place], signal.SIGKILL)
                os.waitpid(relays[place], 0)
                relays[place] = forked(relay)
    for process in relays:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


if __name__ == "__main__":
    told = Orders(**json.loads(sys.argv[1]))
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "tests.contrib.messaging.outbox.settings",
        "OUTBOX_LOG": told.log,
        "OUTBOX_REFUSED": str(told.refused),
    }
    Path(told.log).touch()
    django.setup()
    from idempotency_django.contrib.messaging.outbox import relay as _loaded  # noqa: F401

    gc.freeze()
    supervise(told)
