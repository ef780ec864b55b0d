"""Each recipe for a loop of one's own, in processes that are killed, before a real broker."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import kombu
import pytest
from django.db import OperationalError, connections

from idempotency_django.contrib.messaging import Event
from idempotency_django.contrib.messaging.models import InboxMessage
from tests.contrib.messaging.brokers import SQS, Kafka, RabbitMQ, Redis, await_that
from tests.contrib.messaging.events import paid_in
from tests.contrib.messaging.recipes.run import run
from tests.contrib.messaging.transports import consumers
from tests.contrib.messaging.transports.consumers import AFTER, WITHIN, started
from tests.support.kafka import bootstrap
from tests.support.machine import patience
from tests.support.nightly import few
from tests.support.outside import environment, running
from tests.support.shared import effect_counts
from tests.support.sqs import client_options

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.django_db(transaction=True, databases="__all__"),
]

PATIENCE = 150  # seconds
MALFORMED = b'{"specversion": "1.0", "id": '
RECIPES = {
    "kombu-rabbitmq": "rabbit",
    "kombu-redis": "redis_server",
    "kafka": "kafka",
    "sqs": "sqs_server",
    "sqs-fifo": "sqs_server",
    "celery": "rabbit",
    "faststream": "rabbit",
}


class Recipe:
    """A recipe, a queue of its own, and what its processes are told."""

    def __init__(self, name: str, server: Any) -> None:
        self.name = name.partition("-")[0]
        match name:
            case "kombu-rabbitmq" | "faststream" | "celery":
                self.broker: Any = RabbitMQ(server)
                told = {"BROKER_URL": server.url}
            case "kombu-redis":
                self.broker = Redis(server, visibility=2)
                told = {"BROKER_URL": server.url}
            case "kafka":
                self.broker = Kafka(server)
                told = {"KAFKA_SERVERS": bootstrap(server)}
            case _:
                self.broker = SQS(server, ".fifo" if name == "sqs-fifo" else "")
                options = client_options(server)
                told = {
                    "QUEUE_URL": self.broker._address,
                    "AWS_ENDPOINT_URL": options["endpoint_url"],
                    "AWS_DEFAULT_REGION": options["region_name"],
                    "AWS_ACCESS_KEY_ID": options["aws_access_key_id"],
                    "AWS_SECRET_ACCESS_KEY": options["aws_secret_access_key"],
                }
        self.told = {**told, "QUEUE": self.broker.place}

    def publish(self, *events: Event | bytes) -> None:
        """Send events as the recipe's senders do."""
        if self.name == "sqs":
            fifo = self.broker.place.endswith(".fifo")
            if not fifo and isinstance(events[-1], Event):
                self.broker.publish(events[-1])  # as the outbox does
                events = events[:-1]
            for event in events:
                body = event.decode() if isinstance(event, bytes) else event.to_json()
                more = {"MessageGroupId": "g", "MessageDeduplicationId": uuid.uuid4().hex}
                self.broker.client.send_message(
                    QueueUrl=self.broker._address, MessageBody=body, **(more if fifo else {})
                )
        elif self.name == "celery":
            from celery import Celery

            app = Celery(broker=self.broker.url)
            app.conf.task_default_queue = self.broker.place
            for event in events:
                body = event.decode() if isinstance(event, bytes) else event.to_json()
                app.send_task("shop.tasks.handle_event", [body], queue=self._queue)
            app.close()
        elif self.name == "faststream":
            for event in events:
                body = event if isinstance(event, bytes) else event.to_json().encode()
                self.broker.publish_raw(body, {}, "application/json")
        else:
            self.broker.publish(*events)

    @property
    def _queue(self) -> kombu.Queue:
        return kombu.Queue(self.broker.place, no_declare=True)


@pytest.fixture(params=few(RECIPES))
def recipe(request: pytest.FixtureRequest) -> Iterator[Recipe]:
    """Each of them."""
    made = Recipe(request.param, request.getfixturevalue(RECIPES[request.param]))
    yield made
    made.broker.close()


@pytest.fixture
def start(recipe: Recipe, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts processes of the recipe."""
    with ExitStack() as stack:

        def run() -> subprocess.Popen[str]:
            log = stack.enter_context((tmp_path / "log").open("a"))
            command = ("-m", "tests.contrib.messaging.recipes.run", recipe.name)
            told = environment(**recipe.told)
            return stack.enter_context(running(*command, env=told, stdout=log, stderr=log))

        yield run


def test_settled_without_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no event stays with its broker until it is a row, also if the database is away."""
    monkeypatch.setenv("QUEUE", "billing")
    monkeypatch.setitem(sys.modules, "shop.consumers", consumers)
    monkeypatch.setitem(sys.modules, "settling", ModuleType("settling"))
    run("settling", "settling")
    settle: Any = sys.modules["settling"].settle  # type: ignore[attr-defined]

    def away(*_: object) -> None:
        raise OperationalError("server closed the connection unexpectedly")

    with connections["default"].execute_wrapper(away):
        assert not settle(MALFORMED, "billing", redelivered=False)
    assert settle(MALFORMED, "billing", redelivered=False)
    assert [bytes(row.body) for row in InboxMessage.objects.all()] == [MALFORMED]


def test_killed_and_poisoned(recipe: Recipe, start: Any, tmp_path: Path) -> None:
    """One effect for each event, although some are delivered again, and processes are killed within
    a handler and between commit and acknowledgement. Poison and what is no event become rows.
    """
    recipe.publish(
        paid_in(tmp_path, "a"), paid_in(tmp_path, "a"), paid_in(tmp_path, "w", strike=WITHIN)
    )
    recipe.publish(paid_in(tmp_path, "p", poison=True), MALFORMED)
    recipe.publish(paid_in(tmp_path, "c", strike=AFTER), paid_in(tmp_path, "b"))
    for _ in range(2):
        process = start()
        assert process.wait(patience(PATIENCE)) == -signal.SIGKILL, (tmp_path / "log").read_text()
    last = start()
    dead = InboxMessage.objects.filter(source="consumer:billing", state="dead")
    await_that(
        lambda: len(effect_counts()) == 4 and dead.count() == 2 and recipe.broker.waiting() == 0,
        patience(PATIENCE),
    )
    last.send_signal(signal.SIGTERM)
    assert last.wait(patience(PATIENCE)) == 0
    assert effect_counts() == dict.fromkeys(["a", "w", "c", "b"], 1)
    assert {each: started(tmp_path).count(each) for each in "awcbp"} == {
        "a": 1,
        "w": 2,
        "c": 1,
        "b": 1,
        "p": 5,
    }
    assert sorted(row.type for row in dead) == ["", "order.paid"]
    assert recipe.broker.left() == 0
