"""Celery tasks whose records are in Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from celery import states
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from django_redis import get_redis_connection
from kombu import Message

from idempotency_django.contrib.celery import IdempotentTask
from tests.contrib.celery.test_celery_copies import Post
from tests.models import Effect
from tests.support.servers import Server

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def post(redis_server: Server) -> Iterator[Post]:
    """A queue and a worker; the records of its tasks are in Redis."""
    settings = override_settings(
        CACHES={
            "default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": redis_server.url}
        },
        IDEMPOTENCY={
            "STORES": {
                "default": {
                    "BACKEND": "idempotency_django.contrib.redis.RedisStore",
                    "OPTIONS": {"cache": "default"},
                }
            }
        },
    )
    with settings, ExitStack() as stack:
        get_redis_connection("default").flushall()
        yield Post(stack)
        get_redis_connection("default").connection_pool.disconnect()


def test_in_progress(post: Post) -> None:
    """A delivery in the meantime sends the message again, which returns the first result."""
    sent: list[Message] = []
    keys: list[str] = []

    @post.app.task(base=IdempotentTask, bind=True, shared=False)
    def pay(self: IdempotentTask) -> int:
        keys.append(self.execution.derive_key("charge"))
        assert post.deliver(first, redelivered=True) == states.IGNORED
        sent.extend(iter(post.take, None))
        return int(Effect.objects.create(reference="a").pk)

    pay.apply_async(task_id="one")
    first = post.take()
    assert post.deliver(first) == states.SUCCESS
    [copy] = sent
    assert post.deliver(copy) == states.SUCCESS
    assert post.app.backend.get_result("one") == Effect.objects.get().pk
    assert len(keys) == 1


def test_steps(post: Post) -> None:
    """A step, which Redis cannot keep together with its effect, is refused."""

    @post.app.task(base=IdempotentTask, bind=True, shared=False)
    def pay(self: IdempotentTask) -> None:
        self.execution.step("charge", int)

    pay.apply_async(task_id="one")
    assert post.deliver(post.take()) == states.FAILURE
    assert isinstance(post.app.backend.get_result("one"), ImproperlyConfigured)
