"""Jobs of any queue that are executed once: by hand, and by real queues."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dramatiq
import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django_tasks import TaskResultStatus, task
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from redis import Redis
from rq import Queue, Retry, SimpleWorker

from idempotency_django.contrib.jobs import idempotent_job
from idempotency_django.engine.context import current_execution
from idempotency_django.errors import FingerprintMismatch, OperationInProgress
from idempotency_django.policy import Policy
from idempotency_django.testing import PATIENCE, eventually, in_threads
from tests.e2e import databases
from tests.models import Effect
from tests.support.servers import Server
from tests.support.shared import effects, record

pytestmark = pytest.mark.django_db(transaction=True)

LEASED = Policy(mode="leased")


def book(reference: Any) -> int:
    return int(Effect.objects.create(reference=str(reference)).pk)


@idempotent_job(key="order-{order_id}")
def pay(order_id: int, amount: int = 5) -> list[int]:
    return [book(order_id), amount]


@idempotent_job(key=lambda order_id: order_id, policy=LEASED, name="pay", scope="payments")
async def apay(order_id: int) -> list[Any]:
    execution = current_execution()
    assert execution is not None
    return [await execution.astep("book", book, order_id), execution.attempt]


# By hand.


def test_once() -> None:
    """A second call with the key returns the first result, however its arguments are passed."""
    first = pay(17, 5)
    assert pay(amount=5, order_id=17) == first
    assert effects("17") == 1
    assert record("order-17").scope == f"job:{__name__}.pay"
    with pytest.raises(FingerprintMismatch):
        pay(17, 6)


def test_once_in_a_coroutine() -> None:
    """The same for a coroutine function."""

    async def twice() -> list[Any]:
        return [await apay(17), await apay(17)]

    first, second = async_to_sync(twice)()
    assert first == second
    assert effects("17") == 1
    assert record("17").scope == "payments"


def test_excluded_argument() -> None:
    """What a queue passes of its own is no part of what is asked for."""

    @idempotent_job(key="{order_id}", exclude=["context"])
    def job(context: object, order_id: int) -> int:
        return book(order_id)

    assert job(object(), 17) == job(object(), 17)
    assert effects("17") == 1


def test_wrong_key() -> None:
    """A template that no call could fill in is refused at once."""
    with pytest.raises(ImproperlyConfigured, match="'order', which is not one of its arguments"):

        @idempotent_job(key="{order}")
        def job(order_id: int) -> None: ...


def test_at_once() -> None:
    """Of deliveries at the same moment one is executed; others come again, or wait."""

    @idempotent_job(key="{order_id}", policy=Policy(on_conflict="wait"))
    def waiting(order_id: int) -> int:
        return book(order_id)

    assert len(set(in_threads([lambda: waiting(17)] * 8))) == 1
    assert effects("17") == 1


# By real queues.


class Gate:
    """Keeps the first execution of a job until another delivery of it was refused."""

    def close(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.results: list[Any] = []


gate = Gate()


@pytest.fixture(autouse=True)
def _closed() -> None:
    gate.close()


@idempotent_job(key="{order_id}", policy=LEASED)
def kept(order_id: int) -> int:
    """A job that is in progress until the gate is opened."""
    gate.entered.set()
    assert gate.opened.wait(PATIENCE)
    return book(order_id)


def delivered(order_id: int) -> int:
    """What a queue calls; its threads are not Django's."""
    try:
        result = kept(order_id)
    except OperationInProgress:
        gate.opened.set()
        raise
    finally:
        connections.close_all()
    gate.results.append(result)
    return result


paid = task(pay)


def test_django_tasks() -> None:
    """A task of Django's own, here by the backport: enqueued twice, it has one effect."""
    results = [paid.enqueue(order_id=17) for _ in range(2)]
    assert [result.status for result in results] == [TaskResultStatus.SUCCESSFUL] * 2
    assert results[0].return_value == results[1].return_value
    assert effects("17") == 1


@pytest.mark.parametrize("kind", ["stub", "redis"])
def test_dramatiq(redis_server: Server, kind: str) -> None:
    """A message that comes while its job is in progress is retried by dramatiq, and then has the
    first result.
    """
    broker: Any = StubBroker() if kind == "stub" else RedisBroker(url=redis_server.url)
    broker.emit_after("process_boot")
    actor = dramatiq.actor(delivered, broker=broker, queue_name=kind, min_backoff=50)
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=2)
    worker.start()
    try:
        message = actor.send(17)
        assert gate.entered.wait(PATIENCE)
        broker.enqueue(message)
        eventually(lambda: len(gate.results) == 2)
    finally:
        worker.stop()
        broker.close()
    assert len(set(gate.results)) == 1
    assert effects("17") == 1


def test_rq(redis_server: Server) -> None:
    """A job that rq runs while another one is in progress is retried, and has the same result."""
    connection = Redis.from_url(redis_server.url)
    queue = Queue(connection=connection)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(delivered, 17)
        assert gate.entered.wait(PATIENCE)
        again = queue.enqueue(delivered, 17, retry=Retry(max=1000))
        worker = SimpleWorker([queue], connection=connection)
        worker._install_signal_handlers = lambda: None  # they would stay, and are for a process
        worker.work(burst=True)
        assert again.return_value() == first.result()
    assert effects("17") == 1
    connection.close()


@pytest.mark.skipif("postgres" not in os.environ["TEST_DATABASES"], reason="needs PostgreSQL")
@pytest.mark.skipif(os.environ.get("TEST_PSYCOPG") == "2", reason="needs psycopg 3")
def test_procrastinate() -> None:
    """A job of procrastinate that is retried while it is in progress, on its own tables."""
    import procrastinate

    async def work(url: str) -> None:
        app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))
        job = app.task(retry=procrastinate.RetryStrategy(max_attempts=100), name="job")(delivered)
        async with app.open_async():
            await app.schema_manager.apply_schema_async()
            for _ in range(2):
                await job.defer_async(order_id=17)
            await app.run_worker_async(wait=False, concurrency=2, install_signal_handlers=False)

    with databases.postgres() as database:
        asyncio.run(work(database.url))
    assert len(set(gate.results)) == 1
    assert effects("17") == 1
