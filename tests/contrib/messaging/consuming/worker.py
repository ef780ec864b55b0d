"""Processes that consume, told what to do as JSON.

The first process loads everything and opens nothing. It forks as many consumers as it is told to,
kills some of them at random, replaces each that was killed, and ends when the queues are empty.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import django
from kombu import Connection, Exchange, Queue
from kombu import Consumer as Subscription
from kombu.message import Message

MOMENTS = ("before the effect", "before the commit", "before the acknowledgement")
IDLE = 1.0  # seconds without a message, after which a process has done its work
BATCH = 25


@dataclass(frozen=True)
class Orders:
    """What the processes are told.

    Attributes:
        broker: the URL of RabbitMQ.
        exchange: to which the messages are published; each consumer has a queue of its own at it.
        consumers: the names of the consumers.
        log: a file to which they write who was killed where.
        processes: how many consume at a time.
        batches: how many of them take messages many at a time.
        kills: how many of them are killed at random.
        seed: of the randomness.
        max_attempts: the consumers'.
    """

    broker: str
    exchange: str
    consumers: list[str]
    log: str
    processes: int = 1
    batches: int = 0
    kills: int = 0
    seed: int = 1
    max_attempts: int = 5


def queue_of(orders: Orders, name: str) -> Queue:
    """The queue of a consumer; what it rejects goes to another."""
    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead_of(orders, name)}
    exchange = Exchange(orders.exchange, "fanout", durable=False)
    return Queue(f"{orders.exchange}.{name}", exchange, durable=False, queue_arguments=dead)


def dead_of(orders: Orders, name: str) -> str:
    """The name of the queue of what a consumer rejected."""
    return f"{orders.exchange}.{name}.dead"


def die(orders: Orders, moment: str, number: str) -> None:
    """Note it, and end as if the power had failed."""
    with Path(orders.log).open("a") as log:
        log.write(f"{moment}: {number}\n")
    os.kill(os.getpid(), signal.SIGKILL)


class Worker:
    """Consumes one queue for each consumer, until there is nothing more to be had."""

    def __init__(self, orders: Orders, *, batches: bool) -> None:
        self.orders = orders
        self.batches = batches
        self.waiting: dict[str, list[Message]] = {name: [] for name in orders.consumers}
        self.consumers = {name: self._consumer(name) for name in orders.consumers}

    def _consumer(self, name: str) -> Any:
        from idempotency_django.contrib.messaging import Consumer

        consumer = Consumer(name, max_attempts=self.orders.max_attempts)
        consumer.on("order.paid")(partial(self.book, name))
        return consumer

    def book(self, name: str, event: Any, execution: Any) -> str:
        """Make the effect of an event, or fail at it."""
        from tests.models import Effect

        self.strike(MOMENTS[0], event)
        Effect.objects.create(reference=f"{name} {event.source} {event.id}")
        if event.data.get("kills"):
            die(self.orders, "poison", event.id)
        if event.data.get("poison"):
            raise ValueError(event.id)
        self.strike(MOMENTS[1], event)
        return str(event.id)

    def strike(self, moment: str, event: Any) -> None:
        """End here, if this is the moment that the event names, the first time."""
        log = Path(self.orders.log)
        struck = log.read_text().splitlines() if log.exists() else []
        if event.data.get("strike") == moment and f"{moment}: {event.id}" not in struck:
            die(self.orders, moment, event.id)

    def run(self) -> None:
        """Consume until it is quiet."""
        with Connection(self.orders.broker) as connection:
            channel = connection.channel()
            for name in self.orders.consumers:
                subscription = Subscription(
                    channel,
                    [queue_of(self.orders, name)],
                    on_message=partial(self.receive, name),
                    prefetch_count=BATCH,
                )
                subscription.consume()
            quiet_since = time.monotonic()
            while time.monotonic() - quiet_since < IDLE:
                try:
                    connection.drain_events(timeout=0.05)
                    quiet_since = time.monotonic()
                except TimeoutError:
                    self.flush()

    def receive(self, name: str, message: Message) -> None:
        """Handle it, or wait for more."""
        waiting = self.waiting[name]
        waiting.append(message)
        if not self.batches or len(waiting) == BATCH:
            self.flush()

    def flush(self) -> None:
        """Handle what waits."""
        for name, waiting in self.waiting.items():
            for redelivered in (False, True):
                messages = [m for m in waiting if m.delivery_info["redelivered"] == redelivered]
                if messages:
                    self.handle(name, messages, redelivered=redelivered)
            waiting.clear()

    def handle(self, name: str, messages: list[Message], *, redelivered: bool) -> None:
        """Handle messages, then tell the broker of each."""
        from idempotency_django.contrib.messaging import Event, Failed

        events = [Event.from_json(message.body) for message in messages]
        consumer = self.consumers[name]
        if self.batches and not redelivered:
            outcomes = consumer.handle_many(events)
        else:
            outcomes = [self.outcome(consumer.handle, e, redelivered) for e in events]
        for event, message, outcome in zip(events, messages, outcomes, strict=True):
            self.strike(MOMENTS[2], event)
            if not isinstance(outcome, Failed):
                message.ack()
            elif outcome.rejected:
                message.reject()
            else:
                time.sleep(0.05)
                message.requeue()

    def outcome(self, handle: Callable[..., Any], event: Any, redelivered: bool) -> Any:
        """What became of it, when it is handled alone."""
        from idempotency_django.contrib.messaging import Failed

        try:
            return handle(event, redelivered=redelivered)
        except Exception as error:  # noqa: BLE001  # whatever it is, the broker is told
            return Failed(error)


def forked(orders: Orders, *, batches: bool) -> int:
    """A new process that consumes."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            Worker(orders, batches=batches).run()
            code = 0
        finally:
            if code:
                import traceback

                traceback.print_exc()
            os._exit(code)
    return process


def supervise(orders: Orders) -> None:
    """Keep as many processes at work as there should be, and kill some, until all is quiet."""
    chance = random.Random(orders.seed)
    kinds = [place < orders.batches for place in range(orders.processes)]
    running = {forked(orders, batches=kind): kind for kind in kinds}
    kills = orders.kills
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            kind = running.pop(process)
            if os.WIFSIGNALED(status):
                running[forked(orders, batches=kind)] = kind
            elif os.WEXITSTATUS(status):
                sys.exit(f"A consumer ended with {os.WEXITSTATUS(status)}.")
        elif kills:
            time.sleep(chance.uniform(0.05, 0.5))
            kills -= 1
            os.kill(chance.choice(list(running)), signal.SIGKILL)
        else:
            time.sleep(0.02)


def main() -> None:
    """Do as told."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.contrib.messaging.consuming.settings"
    django.setup()
    for module in ("idempotency_django.contrib.messaging.consumers", "kombu.transport.pyamqp"):
        importlib.import_module(module)
    orders = Orders(**json.loads(sys.argv[1]))
    gc.freeze()
    supervise(orders)


if __name__ == "__main__":
    main()
