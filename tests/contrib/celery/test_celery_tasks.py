"""Celery tasks that are executed once: their keys, their results and how they end."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from django.core.exceptions import ImproperlyConfigured

from idempotency_django.contrib.celery import IdempotentTask
from idempotency_django.errors import FingerprintMismatch, OperationInProgress
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy, keys
from tests.models import Effect
from tests.support.shared import effects, record

pytestmark = pytest.mark.django_db(transaction=True)

LEASED = Policy(mode="leased")


class App(Celery):
    """An app whose tasks are its own."""

    def task(self, *args: Any, **options: Any) -> Any:
        return super().task(*args, **{"shared": False, **options})


@pytest.fixture
def app() -> Iterator[Celery]:
    """An app whose tasks run at once, in the caller's process."""
    with App("tests", broker="memory://", set_as_current=False) as app:
        app.conf.task_always_eager = True
        app.conf.task_eager_propagates = True
        yield app


def book(reference: str = "a") -> int:
    return int(Effect.objects.create(reference=reference).pk)


class Opaque:
    """What pickle takes and JSON does not."""


# What names the operation.


def test_by_its_id(app: Celery) -> None:
    """A message that is delivered again gets the first result; another message is another task."""

    @app.task(base=IdempotentTask)
    def pay(reference: str) -> int:
        return book(reference)

    first = pay.apply_async(("a",), task_id="one").get()
    assert pay.apply_async(("a",), task_id="one").get() == first
    assert effects() == 1
    assert pay.apply_async(("a",), task_id="two").get() != first
    assert effects() == 2
    assert record("one").scope == f"task:{pay.name}"


@pytest.mark.parametrize("key", ["order-{order_id}", lambda order_id, amount: f"order-{order_id}"])
def test_by_a_key(app: Celery, key: Any) -> None:
    """With a key, two messages that name the same operation have one effect."""

    @app.task(base=IdempotentTask, bind=True, key=key)
    def pay(self: IdempotentTask, order_id: int, amount: int = 5) -> int:
        return book(self.execution.key)

    first = pay.apply_async((17, 5)).get()
    assert pay.apply_async(kwargs={"amount": 5, "order_id": 17}).get() == first
    assert pay.apply_async((18, 5)).get() != first
    assert effects("order-17") == 1
    with pytest.raises(FingerprintMismatch, match=rf"'order-17' of {pay.name} was already used"):
        pay.apply_async((17, 6))


def test_no_task_is_lost_by_default(app: Celery) -> None:
    """Its message is acknowledged after the task, also when its process is killed."""

    @app.task(base=IdempotentTask)
    def pay() -> None: ...

    @app.task(base=IdempotentTask, acks_late=False)
    def early() -> None: ...

    assert (pay.acks_late, pay.reject_on_worker_lost) == (True, True)
    assert early.acks_late is False


@pytest.mark.parametrize(
    ("key", "match"),
    [
        ("order-{order}", "'order', which is not one of its arguments: order_id"),
        ("order-{", "not a template"),
        ("order-{0}", "'0', which is not one"),
        (keys.generated, "a new key for each call"),
    ],
)
def test_key_that_cannot_be_made(app: Celery, key: Any, match: str) -> None:
    """A key that no call could have, or no retry, is refused where the task is declared."""
    with pytest.raises(ImproperlyConfigured, match=match):

        @app.task(base=IdempotentTask, key=key, lazy=False)
        def pay(order_id: int) -> None: ...


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (Policy(check_replay=lambda request, record: None), "check_replay="),
        ("leased", "is a str; it must be a Policy"),
    ],
)
def test_policy_that_cannot_be(app: Celery, policy: Any, match: str) -> None:
    """A policy that checks the caller of a request is refused: nobody would be checked."""
    with pytest.raises(ImproperlyConfigured, match=match):

        @app.task(base=IdempotentTask, lazy=False, idempotency_policy=policy)
        def pay() -> None: ...


# Its arguments and its result.


def test_argument_that_is_no_plain_data(app: Celery) -> None:
    """An argument that a retry's cannot be compared with is refused, by its name."""

    @app.task(base=IdempotentTask)
    def pay(order: Any) -> int:
        return book()

    with pytest.raises(TypeError, match=r"The argument 'order' of the task .*pay .*Opaque"):
        pay.apply((Opaque(),))
    assert effects() == 0


def test_default_that_changes(app: Celery) -> None:
    """A new default is no other request: a message of before is still the same one."""

    @app.task(base=IdempotentTask)
    def pay(amount: int = 5) -> int:
        return book()

    first = pay.apply(task_id="one").get()
    pay.run.__defaults__ = (6,)
    assert pay.apply(task_id="one").get() == first


@pytest.mark.parametrize(
    ("result", "json"),
    [
        *((value, value) for value in (None, 1, "é", [1, {"a": None}])),
        (date(2030, 1, 2), "2030-01-02"),
        (Decimal("1.10"), "1.10"),
        (UUID(int=7), str(UUID(int=7))),
    ],
    ids=repr,
)
def test_result(app: Celery, result: Any, json: Any) -> None:
    """The first time and later, it is what Django's encoder writes, read back as JSON."""

    @app.task(base=IdempotentTask)
    def pay() -> Any:
        return result

    told = [pay.apply(task_id="one").get() for _ in range(2)]
    assert told == [json, json]


# How it ends.


@pytest.mark.parametrize("policy", [None, LEASED], ids=["transactional", "leased"])
def test_retry(app: Celery, policy: Policy | None) -> None:
    """``retry()`` frees the key: the same id is executed again, in its next attempt."""
    app.conf.task_eager_propagates = False

    @app.task(base=IdempotentTask, bind=True, idempotency_policy=policy, default_retry_delay=0)
    def pay(self: IdempotentTask) -> list[Any]:
        if self.request.retries < 2:
            raise self.retry()
        return [book(), self.execution.attempt, self.request.id]

    [_, attempt, task] = pay.apply(task_id="one").get()
    assert (attempt, task) == (3, "one")
    assert effects() == 1


@pytest.mark.parametrize("error", [Reject("no", requeue=False), SoftTimeLimitExceeded(), OSError()])
def test_failure(app: Celery, error: Exception) -> None:
    """What the task raises reaches Celery as it is, and frees the key."""
    app.conf.task_eager_propagates = False

    @app.task(base=IdempotentTask, bind=True)
    def pay(self: IdempotentTask) -> int:
        done = book()
        if self.execution.attempt == 1:
            raise error
        return done

    first = pay.apply(task_id="one")
    assert first.result is error
    assert effects() == 0
    assert pay.apply(task_id="one").state == "SUCCESS"
    assert effects() == 1


def test_ignore(app: Celery) -> None:
    """A task that ends with ``Ignore`` has ended: its effect stays, and it is not done again."""

    @app.task(base=IdempotentTask, bind=True)
    def pay(self: IdempotentTask) -> None:
        book()
        raise Ignore("it was moved")

    for _ in range(2):
        ended = pay.apply(task_id="one")
        assert ended.state == "IGNORED"
        assert str(ended.result) == "it was moved"
    assert effects() == 1


def test_in_progress_without_a_message(app: Celery) -> None:
    """An eager task has no message to send again: it fails with the reason."""

    @app.task(base=IdempotentTask, bind=True, idempotency_policy=LEASED)
    def pay(self: IdempotentTask) -> int:
        with pytest.raises(OperationInProgress):
            pay.apply(task_id=self.request.id)
        return book()

    pay.apply(task_id="one")
    assert effects() == 1


# Without a message.


def test_called_as_a_function(app: Celery) -> None:
    """Without a key, a task that is called has nothing that names its operation: it just runs."""

    @app.task(base=IdempotentTask, bind=True)
    def pay(self: IdempotentTask, inside: bool = False) -> int:
        return self.execution.attempt if inside else book()

    assert pay() != pay()
    assert effects() == 2
    assert not IdempotencyKey.objects.exists()
    with pytest.raises(ImproperlyConfigured, match="called as a function"):
        pay(inside=True)


def test_called_with_a_key(app: Celery) -> None:
    """With a key, a call as a function counts as any message."""

    @app.task(base=IdempotentTask, bind=True, key="order-{order_id}")
    def pay(self: IdempotentTask, order_id: int) -> list[Any]:
        return [book(self.execution.key), self.request.called_directly]

    first = pay(17)
    assert first[1] is True
    assert pay.apply((17,)).get() == pay(17) == first
    assert effects("order-17") == 1
