"""Publish, relay, consume, and die at the boundary that one is told: ``python -m …crashing``.

It prints, as JSON, what was counted after each crash and its recovery, and each boundary's name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import django

if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.contrib.messaging.outbox.settings"
    django.setup()

from idempotency_django.contrib.messaging import Batch, Consumer, LocalPublisher, Relay, publish
from idempotency_django.contrib.messaging.models import OutboxMessage, OutboxStream
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.models import DatabaseNow, IdempotencyKey, IdempotencyStep
from idempotency_django.policy import Policy
from tests.contrib.messaging.forks import Fate, returned
from tests.models import Effect

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


def boundaries(mode: str, group: str) -> list[str]:
    """What is passed when nobody dies."""
    with fate.watched():
        chain(mode, group)
    passed = list(fate.passed)
    recover(mode, group)
    return passed


def struck(mode: str, group: str, at: int) -> None:
    """Die at this boundary."""
    fate.at = at
    with fate.watched():
        chain(mode, group)


def main(mode: str, group: str, stride: int) -> dict[str, Any]:
    """Die at each boundary, or at each so-many-th, and recover."""
    code, passed = returned(lambda: boundaries(mode, group))
    assert code == 0
    counted = {}
    for at in range(0, len(passed), stride):
        code, _ = returned(lambda at=at: struck(mode, group, at))
        assert code == -signal.SIGKILL, (at, code)
        code, counts = returned(lambda: recover(mode, group))
        assert code == 0
        counted[f"{at} {passed[at]}"] = counts
    return counted


if __name__ == "__main__":
    sys.modules["tests.contrib.messaging.outbox.crashing"] = sys.modules[
        "__main__"
    ]  # there is one booking
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
