"""Celery tasks that replace themselves: each replacement is an operation of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from celery import chain, states
from kombu import Message

from idempotency_django.contrib.celery import IdempotentTask
from idempotency_django.policy import Policy
from tests.contrib.celery.test_celery_copies import LEASED, Post, book
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
