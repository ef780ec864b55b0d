"""Celery tasks that replace themselves: each replacement is an operation of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from celery import Task, chain, states
from kombu import Message

from idempotency_django.contrib.celery import IdempotentTask
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.stores.records import referred
from tests.contrib.celery.test_celery_copies import LEASED, Post, book
from tests.models import Effect
from tests.support.shared import effects

pytestmark = pytest.mark.django_db(transaction=True)

POLICIES = pytest.mark.parametrize("policy", [None, LEASED], ids=["transactional", "leased"])


@pytest.fixture
def post() -> Iterator[Post]:
    with ExitStack() as stack:
        yield Post(stack)


def all_of(post: Post, then: Callable[[Message], None] = lambda _: None) -> list[str]:
    """The states that the queue's messages end in, each delivered twice, and all again at last."""
    messages: list[Message] = []
    ended: list[str] = []
    while message := post.take():
        messages.append(message)
        ended.append(post.deliver(message))
        then(message)
        assert post.deliver(message, redelivered=True) == ended[-1]
    assert [post.deliver(message, redelivered=True) for message in messages] == ended
    assert post.take() is None
    return ended


def poller(post: Post, times: int = 3, **options: Any) -> Any:
    """A task that replaces itself, with equal arguments, until it has had its effects."""

    @post.app.task(base=IdempotentTask, bind=True, shared=False, **options)
    def poll(self: IdempotentTask, *_: Any) -> str:
        book()
        return "ready" if effects() == times else self.replace(poll.si())

    return poll


@POLICIES
def test_the_same_again(post: Post, policy: Policy | None) -> None:
    """A task that polls is executed as often as without us, and each of its messages once."""
    poller(post, idempotency_policy=policy).apply_async(task_id="one")
    assert all_of(post) == [states.IGNORED, states.IGNORED, states.SUCCESS]
    assert post.app.backend.get_result("one") == "ready"
    assert effects() == 3


@POLICIES
@pytest.mark.parametrize("key", [None, "order-{number}"])
def test_with_other_arguments(post: Post, policy: Policy | None, key: str | None) -> None:
    """A task that counts down ends, and has the effects that it has without us."""

    @post.app.task(base=IdempotentTask, bind=True, shared=False, idempotency_policy=policy, key=key)
    def count(self: IdempotentTask, number: int) -> str:
        book(str(number))
        return self.replace(count.si(number - 1)) if number else "done"

    count.apply_async((2,), task_id="one")
    assert all_of(post) == [states.IGNORED, states.IGNORED, states.SUCCESS]
    assert post.app.backend.get_result("one") == "done"
    assert [effects(str(number)) for number in range(3)] == [1, 1, 1]


def test_back_again(post: Post) -> None:
    """What another task replaced may replace that one; Celery's own too."""

    @post.app.task(base=Task, bind=True, shared=False)
    def wait(self: Any) -> str:
        return self.replace(ask.si())

    @post.app.task(base=IdempotentTask, bind=True, shared=False)
    def ask(self: IdempotentTask) -> str:
        book()
        return "ready" if effects() == 3 else self.replace(wait.si())

    ask.apply_async(task_id="one")
    ended: list[str] = []
    while message := post.take():
        ended.append(post.deliver(message))
        if message.headers["task"] == ask.name:
            assert post.deliver(message, redelivered=True) == ended[-1]
    assert ended == [*[states.IGNORED] * 4, states.SUCCESS]
    assert effects() == 3


def test_key_of_another_task(post: Post) -> None:
    """What a task's key names is done once, whoever asks for it: a message or a replacement."""

    @post.app.task(base=IdempotentTask, shared=False, key="order-{order}")
    def settle(order: int) -> int:
        return book()

    @post.app.task(base=IdempotentTask, bind=True, shared=False)
    def ask(self: IdempotentTask) -> int:
        return self.replace(settle.si(17))

    settle.delay(17)
    ask.apply_async(task_id="one")
    assert all_of(post) == [states.SUCCESS, states.IGNORED, states.SUCCESS]
    assert post.app.backend.get_result("one") == Effect.objects.get().pk


@pytest.mark.parametrize("form", ["chain", "within a chain"])
def test_by_more_than_one(post: Post, form: str) -> None:
    """A task may be replaced by a chain that it is part of."""

    @post.app.task(shared=False)
    def other(*_: Any) -> str:
        return "other"

    @post.app.task(base=IdempotentTask, bind=True, shared=False)
    def ask(self: IdempotentTask, *_: Any) -> Any:
        if book("ask") and effects("ask") == 2:
            return "asked"
        forms = {
            "chain": lambda: chain(other.si(), ask.s()),
            "within a chain": lambda: chain(ask.si(), other.s()),
        }
        return self.replace(forms[form]())

    chain(ask.si().set(task_id="one"), other.s().set(task_id="last")).apply_async()
    while message := post.take():
        post.deliver(message)
        if message.headers["task"] == ask.name:
            post.deliver(message, redelivered=True)
    assert effects("ask") == 2
    assert post.app.backend.get_result("last") == "other"


def test_a_retry_of_a_replacement(post: Post) -> None:
    """What retries keeps its place: it is the replacement's next attempt."""

    @post.app.task(base=IdempotentTask, bind=True, shared=False)
    def poll(self: IdempotentTask) -> Any:
        if not self.request.retries:
            if not effects():
                book()
                return self.replace(poll.si())
            raise self.retry(countdown=0)
        book()
        return self.execution.attempt

    poll.apply_async(task_id="one")
    first = post.take()
    assert [post.deliver(first), post.deliver(first)] == [states.IGNORED] * 2
    assert post.deliver(post.take()) == states.RETRY
    last = post.take()
    assert [post.deliver(last), post.deliver(last)] == [states.SUCCESS] * 2
    assert post.app.backend.get_result("one") == 2
    assert effects() == 2


def test_copies_of_a_replacement(post: Post) -> None:
    """Each replacement that is delivered too early has a copy of its own."""
    copies: list[Message] = []

    @post.app.task(base=IdempotentTask, bind=True, shared=False, idempotency_policy=LEASED)
    def poll(self: IdempotentTask) -> Any:
        assert post.deliver(now[-1], redelivered=True) == states.IGNORED
        copy = post.take()
        assert copy is not None
        copies.append(copy)
        book()
        return effects() if effects() == 2 else self.replace(poll.si())

    poll.apply_async(task_id="one")
    now = [post.take()]
    assert post.deliver(now[-1]) == states.IGNORED
    now.append(post.take())
    assert post.deliver(now[-1]) == states.SUCCESS
    assert [post.deliver(copy) for copy in copies] == [states.IGNORED, states.SUCCESS]
    assert effects() == 2


def test_a_worker_that_dies_after_replacing(post: Post) -> None:
    """A replacement that is sent twice, since its sender had to begin again, has one effect."""
    sent: list[Message] = []

    class Killed(BaseException):
        """The process ends."""

    @post.app.task(base=IdempotentTask, bind=True, shared=False)
    def poll(self: IdempotentTask) -> Any:
        book()
        if effects() == 2:
            return "ready"
        try:
            self.replace(poll.si())
        finally:
            sent.append(post.take())
            if len(sent) == 1:
                raise Killed

    poll.apply_async(task_id="one")
    first = post.take()
    with pytest.raises(Killed):
        post.deliver(first)
    assert post.deliver(first, redelivered=True) == states.IGNORED
    assert [post.deliver(message) for message in sent] == [states.SUCCESS] * 2
    assert effects() == 2


def test_parents(post: Post) -> None:
    """The record of a replacement names the one that it replaces."""
    poller(post).apply_async(task_id="one")
    all_of(post)
    rows = IdempotencyKey.objects.filter(caused_by__gt="")
    assert {row.key: referred(row.caused_by)[0] for row in rows} == {
        "one:1": "one",
        "one:2": "one:1",
    }
