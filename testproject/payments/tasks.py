"""The same effect as a Celery task in a worker."""

from __future__ import annotations

import time
from typing import Any

from celery import shared_task

from idempotency_django.contrib.celery import IdempotentTask
from idempotency_django.policy import Policy

from .models import Effect, Kind


@shared_task(
    base=IdempotentTask, bind=True, idempotency_policy=Policy(store="database", mode="leased")
)
def book(self: IdempotentTask, owner: int, asked: dict[str, Any], seconds: float = 0) -> int:
    """Make the row in a step, whose result is stored with it, and work for a while."""
    effect: int = self.execution.step("book", _booked, owner, asked)
    time.sleep(seconds)
    return effect


@shared_task(acks_late=True)
def book_unprotected(owner: int, asked: dict[str, Any], seconds: float = 0) -> int:
    """The same as a task of Celery's own."""
    effect = _booked(owner, asked)
    time.sleep(seconds)
    return effect


def _booked(owner: int, asked: dict[str, Any]) -> int:
    return Effect.objects.create(kind=Kind.JOB, owner_id=owner, **asked).pk
