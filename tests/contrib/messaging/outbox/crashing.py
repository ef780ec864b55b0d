"""Publish, relay, consume, and die at the boundary that one is told: ``python -m …crashing``.

It prints, as JSON, what was counted after each crash and its recovery, and each boundary's name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import django
from django.db import connection

if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.contrib.messaging.outbox.settings"
    django.setup()

from idempotency_django.contrib.messaging import Batch, Consumer, LocalPublisher, Relay, publish
from idempotency_django.contrib.messaging.models import OutboxMessage, OutboxStream
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.models import DatabaseNow, IdempotencyKey, IdempotencyStep
from idempotency_django.policy import Policy
from tests.models import Effect


@dataclass
class Fate:
    """Where this process dies: at the boundary with this number; ``None``: nowhere."""

    at: int | None = None
    passed: list[str] = field(default_factory=list)

    def boundary(self, name: str) -> None:
        """A boundary is passed, or the end has come."""
        if len(self.passed) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.passed.append(name)


fate = Fate()
booking = Consumer("booking")


@booking.on("paid")
def book(event: Any, execution: Any) -> None:
    """The effect at the end of the chain."""
    Effect.objects.create(reference="consumed")


class Wire(LocalPublisher):
    """A broker, with the network before and after it."""

    def publish(self, batch: Batch) -> None:
        fate.boundary("before sending")
        super().publish(batch)
        fate.boundary("after sending")


def pay(mode: str, group: str) -> None:
    """The request at the beginning of the chain, and each of its retries."""

    def handler(execution: Any) -> str:
        def effect() -> str:
            Effect.objects.create(reference="published")
            return publish("local", {"id": 17}, type="paid", group=group or None)

        return execution.step("pay", effect) if mode == "leased" else effect()

    idempotent_call(handler, key="k", scope="s", policy=Policy(mode=mode))


def chain(mode: str, group: str) -> None:
    """From the request to the effect of the consumer."""
    pay(mode, group)
    Relay().drain()


@contextmanager
def watched() -> Iterator[None]:
    """Each statement and each commit has a boundary before and after it."""

    def watch(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        name = " ".join(sql.split()[:4])
        fate.boundary(f"before {name}")
        result = execute(sql, *rest)
        fate.boundary(f"after {name}")
        return result

    commit = connection._commit  # type: ignore[attr-defined]

    def watched_commit() -> None:
        fate.boundary("before COMMIT")
        commit()
        fate.boundary("after COMMIT")

    connection._commit = watched_commit  # type: ignore[attr-defined]
    with ExitStack() as stack:
        stack.enter_context(connection.execute_wrapper(watch))
        yield
    del connection._commit  # type: ignore[attr-defined]


def recover(mode: str, group: str) -> dict[str, int]:
    """Time passes, the client retries, a relay runs; then count, and leave nothing."""
    past = DatabaseNow() - timedelta(seconds=1)
    IdempotencyKey.objects.exclude(lease_expires_at=None).update(lease_expires_at=past)
    OutboxMessage.objects.filter(state="pending").update(process_after=past)
    chain(mode, group)
    counts = {
        name: Effect.objects.filter(reference=name).count() for name in ("published", "consumed")
    }
    counts["messages"] = OutboxMessage.objects.filter(state="done").count()
    tables = (Effect, OutboxMessage, OutboxStream, IdempotencyStep, IdempotencyKey)
    for model in tables:
        model.objects.all().delete()
    return counts


def forked(work: Callable[[], object]) -> tuple[int, Any]:
    """How a new process ends that does it, and what that returns."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.write(writing, json.dumps(work()).encode())
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        reply = pipe.read()
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), json.loads(reply or "null")


def boundaries(mode: str, group: str) -> list[str]:
    """What is passed when nobody dies."""
    with watched():
        chain(mode, group)
    passed = list(fate.passed)
    recover(mode, group)
    return passed


def struck(mode: str, group: str, at: int) -> None:
    """Die at this boundary."""
    fate.at = at
    with watched():
        chain(mode, group)


def main(mode: str, group: str, stride: int) -> dict[str, Any]:
    """Die at each boundary, or at each so-many-th, and recover."""
    code, passed = forked(lambda: boundaries(mode, group))
    assert code == 0
    counted = {}
    for at in range(0, len(passed), stride):
        code, _ = forked(lambda at=at: struck(mode, group, at))
        assert code == -signal.SIGKILL, (at, code)
        code, counts = forked(lambda: recover(mode, group))
        assert code == 0
        counted[f"{at} {passed[at]}"] = counts
    return counted


if __name__ == "__main__":
    sys.modules["tests.contrib.messaging.outbox.crashing"] = sys.modules[
        "__main__"
    ]  # there is one booking
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
