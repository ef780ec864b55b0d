"""Messages of Celery that come while their task is in progress, or when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, states
from celery.app.trace import build_tracer
from celery.exceptions import Reject
from django.utils.timezone import now
from kombu import Message
from kombu.exceptions import OperationalError

from idempotency_django.contrib.celery import IdempotentTask
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.errors import OperationHeld, StoreUnavailable
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import referred
from tests.models import Effect
from tests.support.shared import effects

pytestmark = pytest.mark.django_db(transaction=True)

LEASED = Policy(mode="leased", lease=timedelta(seconds=30))


class Post:
    """A broker's queue, and a worker that takes one message at a time."""

    def __init__(self, stack: ExitStack) -> None:
        self.app = stack.enter_context(
            Celery("post", broker="memory://", backend="cache+memory://", set_as_current=False)
        )
        self.app.backend.client.cache.clear()  # which all apps of the process share
        self.app.conf.task_default_queue = f"post-{uuid4()}"
        self.app.conf.broker_connection_retry_on_startup = True
        self._queue = stack.enter_context(
            stack.enter_context(self.app.connection_for_read()).SimpleQueue(
                self.app.conf.task_default_queue
            )
        )

    def take(self) -> Message | None:
        """The next message; ``None``: there is none."""
        try:
            message = self._queue.get_nowait()
        except self._queue.Empty:
            return None
        message.ack()
        return message

    def deliver(self, message: Message, *, redelivered: bool = False) -> str:
        """Execute what a message asks for, as a worker does; the state that it ends in."""
        args, kwargs, embed = message.payload
        info = {**message.delivery_info, "redelivered": redelivered, "priority": 7}
        request = {**message.headers, **embed, "delivery_info": info, "hostname": "here"}
        request["reply_to"] = message.properties.get("reply_to")
        task = self.app.tasks[message.headers["task"]]
        tracer = build_tracer(task.name, task, app=self.app)
        ended = tracer(message.headers["id"], args, kwargs, request)
        return str(ended.info.state if ended.info else states.SUCCESS)


@pytest.fixture
def post() -> Iterator[Post]:
    with ExitStack() as stack:
        yield Post(stack)


def book(reference: str = "a") -> int:
    return int(Effect.objects.create(reference=reference).pk)


def a_task(post: Post, during: Callable[[], None], policy: Policy = LEASED, **options: Any) -> Any:
    """A task during whose first attempt something else happens."""

    @post.app.task(
        base=IdempotentTask, bind=True, idempotency_policy=policy, shared=False, **options
    )
    def pay(self: IdempotentTask, reference: str = "a") -> int:
        if self.execution.attempt == 1:
            during()
        return book(reference)

    return pay


@pytest.mark.parametrize("policy", [Policy(lease=timedelta(seconds=30)), LEASED])
def test_in_progress(post: Post, policy: Policy) -> None:
    """A delivery that comes while the task is in progress sends the message once more, for the
    time when the lease ends, or the policy's, where a transaction has none, and is acknowledged.
    The copy then returns the first result.
    """
    copies: list[tuple[Message, datetime]] = []

    def during() -> None:
        before = now()
        assert post.deliver(first, redelivered=True) == states.IGNORED
        copies.append((post.take(), before))

    pay = a_task(post, during, policy)
    pay.apply_async(task_id="one")
    first = post.take()
    assert post.deliver(first) == states.SUCCESS
    [(copy, before)] = copies
    assert copy.headers["id"] == "one"
    due = datetime.fromisoformat(copy.headers["eta"])
    assert timedelta(seconds=28) < due - before < timedelta(seconds=32)
    assert timedelta(0) < due - now() <= timedelta(seconds=31)
    assert post.deliver(copy) == states.SUCCESS
    assert effects() == 1
    assert post.take() is None


def test_what_a_copy_keeps(post: Post) -> None:
    """A copy is the same message: its id, its place among others, and what comes after it."""
    copies: list[Message] = []

    def during() -> None:
        post.deliver(first, redelivered=True)
        copies.append(post.take())

    pay = a_task(post, during, time_limit=100)
    link = pay.s().set(task_id="linked")
    pay.apply_async(
        ("b",),
        task_id="one",
        parent_id="parent",
        root_id="root",
        group_id="group",
        group_index=3,
        chord=pay.s(),
        chain=[pay.s()],
        link=link,
        link_error=pay.s(),
        headers={"mine": "yes"},
        expires=0.5,
        priority=7,
        shadow="other",
        argsrepr="(hidden)",
        ignore_result=True,
        soft_time_limit=50,
        reply_to="me",
    )
    first = post.take()
    asked_for = deepcopy(first.payload)
    post.deliver(first)
    [copy] = copies
    changed = {"eta", "expires", "idempotency_again", "origin"}
    assert {k: v for k, v in copy.headers.items() if k not in changed} == {
        k: v for k, v in first.headers.items() if k not in changed
    }
    assert copy.headers["idempotency_again"] is True
    assert copy.headers["retries"] == first.headers["retries"] == 0
    assert copy.headers["expires"] is None  # it was begun in time
    assert copy.payload == asked_for
    assert copy.properties["correlation_id"] == "one"
    assert copy.properties["reply_to"] == "me"
    assert copy.properties["priority"] == 7


def test_store_that_cannot_be_reached(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that could not be begun for want of its store does not fail: it comes again."""

    def refuse(*_: object) -> None:
        raise StoreUnavailable

    pay = a_task(post, lambda: None)
    pay.apply_async(task_id="one")
    with monkeypatch.context() as patched:
        patched.setattr(DatabaseStore, "acquire", refuse)
        assert post.deliver(post.take()) == states.IGNORED
    assert post.deliver(post.take()) == states.SUCCESS
    assert effects() == 1


def test_broker_that_takes_nothing(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no copy can be sent, the broker is to deliver this message again."""
    ended: list[Any] = []

    def refuse(*_: object, **__: object) -> None:
        raise OperationalError

    def during() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(post.app, "send_task", refuse)
            try:
                ended.append(post.deliver(first, redelivered=True))
            except Reject as reject:
                ended.append(reject.requeue)

    pay = a_task(post, during)
    pay.apply_async(task_id="one")
    first = post.take()
    post.deliver(first)
    assert ended == [states.REJECTED]


# When it is over.


@pytest.mark.parametrize("redelivered", [True, False])
def test_failed_task(post: Post, redelivered: bool) -> None:
    """A failure that Celery has recorded stands for all deliveries of that message. Somebody who
    sends a failed task again, with its id, wants it to be executed.
    """
    attempts: list[int] = []

    @post.app.task(base=IdempotentTask, bind=True, shared=False)
    def pay(self: IdempotentTask) -> int:
        attempts.append(self.execution.attempt)
        if self.execution.attempt == 1:
            raise OSError
        return book()

    pay.apply_async(task_id="one")
    first = post.take()
    assert post.deliver(first) == states.FAILURE
    again = post.deliver(first, redelivered=redelivered)
    assert again == (states.IGNORED if redelivered else states.SUCCESS)
    assert attempts == ([1] if redelivered else [1, 2])


# Which operation it comes from.


def test_parents(post: Post) -> None:
    """The record of each task names the operation that sent it: a call, a task, a chain, a link."""

    @post.app.task(base=IdempotentTask, bind=True, shared=False)
    def child(self: IdempotentTask, *_: Any) -> None: ...

    @post.app.task(base=IdempotentTask, bind=True, shared=False)
    def parent(self: IdempotentTask) -> None:
        child.apply_async(task_id="child")

    def call(_: Any) -> None:
        parent.apply_async(
            task_id="parent",
            link=child.s().set(task_id="linked"),
            chain=[child.s().set(task_id="last"), child.s().set(task_id="next")],
        )

    idempotent_call(call, key="call", scope="calls")
    while message := post.take():
        assert post.deliver(message) == states.SUCCESS
    causes = {
        row.key: referred(row.caused_by)[0]
        for row in IdempotencyKey.objects.filter(scope__startswith="task:")
    }
    assert causes == {
        "parent": "call",
        "child": "parent",
        "linked": "parent",
        "next": "parent",
        "last": "next",
    }


def test_without_a_result_backend(post: Post) -> None:
    """Where Celery stores no results, which is its default, a message that comes again is executed,
    and once it was, not again.
    """
    with Celery("none", broker="memory://", set_as_current=False) as app:
        app.conf.task_default_queue = post.app.conf.task_default_queue
        post.app = app
        pay = a_task(post, lambda: None)
        pay.apply_async(task_id="one")
        message = post.take()
        assert message is not None
        for _ in range(2):
            assert post.deliver(message, redelivered=True) == states.SUCCESS
            assert effects() == 1


def test_result_backend_that_is_away(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that comes again is sent once more while nobody knows how its task has ended."""

    def away(_: str) -> str:
        raise OSError("away")

    pay = a_task(post, lambda: None)
    pay.apply_async(task_id="one")
    first = post.take()
    assert first is not None
    with monkeypatch.context() as patched:
        patched.setattr(post.app.backend, "get_state", away)
        assert post.deliver(first, redelivered=True) == states.IGNORED
    assert effects() == 0
    copy = post.take()
    assert copy is not None
    assert post.deliver(copy) == states.SUCCESS
    assert effects() == 1


def test_limited_attempts(post: Post) -> None:
    """A task whose attempts are used up is held: its next delivery fails, and says so."""

    @post.app.task(base=IdempotentTask, shared=False, max_attempts=2)
    def pay() -> None:
        book()
        raise OSError

    pay.apply_async(task_id="one")
    message = post.take()
    for _ in range(3):
        assert post.deliver(message) == states.FAILURE
    assert isinstance(post.app.backend.get_result("one"), OperationHeld)
    assert effects() == 0
    assert IdempotencyKey.objects.get().attempt == 2


@pytest.mark.parametrize("policy", [None, LEASED], ids=["transactional", "leased"])
def test_a_task_that_replaces_itself(post: Post, policy: Policy | None) -> None:
    """A task that polls is executed as often as without us, and each of its messages once."""

    @post.app.task(base=IdempotentTask, bind=True, shared=False, idempotency_policy=policy)
    def poll(self: IdempotentTask) -> str:
        book()
        return "ready" if effects() == 3 else self.replace(poll.si())

    poll.apply_async(task_id="one")
    messages: list[Message] = []
    while message := post.take():
        messages.append(message)
        ended = post.deliver(message)
        assert post.deliver(message, redelivered=True) == ended
    assert ended == states.SUCCESS
    assert [post.deliver(each, redelivered=True) for each in messages[:-1]] == [states.IGNORED] * 2
    assert post.app.backend.get_result("one") == "ready"
    assert effects() == 3
