"""Tasks that are enqueued if, and only if, a transaction is committed."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import kombu
import pytest
from celery import Celery
from django.db import transaction
from django.test import override_settings

from idempotency_django.contrib.celery import CAUSED_BY, IdempotentTask
from idempotency_django.contrib.messaging import CeleryPublisher, Relay
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.errors import FingerprintMismatch
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.support.servers import Server
from tests.support.shared import LONG_AGO

from .messages import Outage, outgoing, published

pytestmark = pytest.mark.django_db(transaction=True)


class App(Celery):
    """An app whose tasks are its own."""

    def task(self, *args: Any, **options: Any) -> Any:
        return super().task(*args, **{"shared": False, **options})


app = App("publishing", broker="memory://", set_as_current=False, fixups=[])
app.conf.task_always_eager = app.conf.task_eager_propagates = True
here = f"{__name__}.app"


@app.task(base=IdempotentTask)
def pay(reference: str, amount: int = 500) -> int:
    return int(Effect.objects.create(reference=reference).pk)


@app.task(
    base=IdempotentTask, key="order-{order_id}", idempotency_policy=Policy(ttl=timedelta(hours=1))
)
def settle(order_id: int, amount: int = 500) -> int:
    return int(Effect.objects.create(reference=f"order-{order_id}").pk)


@pytest.fixture(autouse=True)
def outbox() -> Iterator[None]:
    """The outbox uses the app of this module."""
    with override_settings(IDEMPOTENCY={"OUTBOX": {"celery": {"OPTIONS": {"app": here}}}}):
        yield


def effects() -> list[str]:
    return sorted(Effect.objects.values_list("reference", flat=True))


def test_committed() -> None:
    """A task is executed once its transaction is committed, under the id that was returned."""
    with transaction.atomic():
        task_id = pay.enqueue_once("a", amount=7)
    assert effects() == []
    assert Relay().drain() == 1
    assert effects() == ["a"]
    assert IdempotencyKey.objects.get().key == task_id


def test_rolled_back() -> None:
    """A task is not executed if its transaction is rolled back."""
    with transaction.atomic():
        pay.enqueue_once("a")
        transaction.set_rollback(True)
    assert Relay().drain() == 0
    assert effects() == []


def test_sent_twice() -> None:
    """A message that the relay sends twice is one task, because its id is the task's."""
    with transaction.atomic():
        pay.enqueue_once("a")
    Relay().drain()
    OutboxMessage.objects.update(state="pending", process_after=LONG_AGO)
    assert Relay().drain() == 1
    assert effects() == ["a"]


def test_one_key() -> None:
    """However often the same key is enqueued, in one transaction or in several, its task has its
    effect once.
    """
    with transaction.atomic():
        settle.enqueue_once(17)
        settle.enqueue_once(order_id=17)
    Relay().drain()
    with transaction.atomic():
        settle.enqueue_once(17)
        settle.enqueue_once(18)
    Relay().drain()
    assert effects() == ["order-17", "order-18"]
    assert {*OutboxMessage.objects.values_list("state", flat=True)} == {"done"}


def test_other_arguments_under_a_key() -> None:
    """Other arguments under the same key are not dropped in silence: the task refuses them."""
    with transaction.atomic():
        first = settle.enqueue_once(17)
        other = settle.enqueue_once(17, amount=900)
    assert first != other
    Relay().drain()
    assert effects() == ["order-17"]
    refused = OutboxMessage.objects.get(message_id=other)
    assert FingerprintMismatch.__name__ in refused.error
    assert refused.attempts == 1  # it is this message's failure, and no outage


@pytest.fixture
def _like_a_worker() -> Iterator[None]:
    """The error of a task is the task's own, and not its sender's."""
    app.conf.task_eager_propagates = False
    yield
    app.conf.task_eager_propagates = True


@pytest.mark.usefixtures("_like_a_worker")
@pytest.mark.parametrize("mode", ["transactional", "leased"])
def test_failed_before(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key whose task has failed is enqueued again, and its task is executed again: once."""
    monkeypatch.setattr(settle, "idempotency_policy", Policy(mode=mode, ttl=timedelta(days=1)))
    create = Effect.objects.create
    monkeypatch.setattr(Effect.objects, "create", lambda **_: 1 / 0)
    with transaction.atomic():
        settle.enqueue_once(17)
    Relay().drain()
    assert (effects(), IdempotencyKey.objects.get().status) == ([], "failed")
    monkeypatch.setattr(Effect.objects, "create", create)
    with transaction.atomic():
        settle.enqueue_once(17)
        settle.enqueue_once(order_id=17)
    assert Relay().drain() == 2
    assert effects() == ["order-17"]


@pytest.mark.parametrize("arguments", [(object(),), ()])
def test_arguments_that_do_not_fit(arguments: tuple[Any, ...]) -> None:
    """Arguments that the task could not be called with are refused before anything is written."""
    with transaction.atomic(), pytest.raises(TypeError):
        pay.enqueue_once(*arguments)
    assert not OutboxMessage.objects.exists()


# On a broker.


@pytest.fixture(params=["rabbit", "redis_server"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


client: Celery
"""An app that knows no task."""


@pytest.fixture
def queue(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[kombu.Queue]:
    """The queue that such an app sends to."""
    name = f"tasks-{uuid.uuid4().hex}"
    with (
        Celery("client", broker=server.url, set_as_current=False, fixups=[]) as client,
        kombu.Connection(server.url) as connection,
    ):
        monkeypatch.setattr(f"{__name__}.client", client, raising=False)
        client.conf.task_default_queue = name
        queue = client.amqp.queues[name](connection.channel())
        queue.declare()
        yield queue
        queue.delete()


def test_on_a_broker(queue: kombu.Queue) -> None:
    """A task is sent by its name, with the message's id, and with the message as its cause; the
    same on every attempt.
    """
    message = outgoing("t-1", topic="celery", type="shop.pay", data={"args": [17]})
    publisher = CeleryPublisher("celery", app=f"{__name__}.client")
    for _ in range(2):
        assert published(publisher, [message]) == [None]
    publisher.close()
    for _ in range(2):
        sent = queue.get(no_ack=True)
        assert sent.headers["task"] == "shop.pay"
        assert sent.headers["id"] == "t-1"
        assert sent.headers[CAUSED_BY] == "t-1 outbox:celery"
        assert json.loads(sent.body)[:2] == [[17], {}]
    assert queue.get(no_ack=True) is None


def result_at(broker: str, monkeypatch: pytest.MonkeyPatch) -> Exception | None:
    """What becomes of a message at that broker."""
    with Celery("client", broker=broker, set_as_current=False, fixups=[]) as client:
        monkeypatch.setattr(f"{__name__}.client", client, raising=False)
        publisher = CeleryPublisher(
            "celery", app=f"{__name__}.client", timeout=timedelta(seconds=0.5)
        )
        message = outgoing("a", type="shop.pay", data={})
        with ThreadPoolExecutor(1) as pool:
            [result] = pool.submit(published, publisher, [message]).result(20)
    return result


def test_broker_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the broker cannot be reached, or is silent, no message is blamed for it."""
    away = result_at("amqp://127.0.0.1:1//", monkeypatch)
    assert isinstance(away, Outage)
    assert "refused" in str(away)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        assert isinstance(result_at(url, monkeypatch), Outage)
