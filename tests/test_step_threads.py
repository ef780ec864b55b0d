"""Steps belong to the thread that runs the handler: their order must be the same each time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from idempotency_django import engine
from idempotency_django.engine import Executed, Result
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import Operation, Payload
from idempotency_django.testing import PATIENCE, SECOND, an_operation

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


def attempt(operation: Operation, handler: Any) -> Any:
    def execute(execution: ExecutionContext) -> Result:
        return Result(handler(execution), Payload(201, (), b""))

    def reraise(error: Exception) -> Result:
        raise error

    return engine.run(DatabaseStore("default"), operation, execute, reraise)


def test_step_in_a_thread() -> None:
    """A step from a thread of the handler's is refused before it does anything, on each attempt.

    Which of several threads comes first is not the same each time, so that a retry would find
    other steps and be refused for ever, after some of them were done.
    """
    operation, done = an_operation(lease=30 * SECOND), []

    def handler(order: list[str]) -> Any:
        def run(execution: ExecutionContext) -> None:
            with ThreadPoolExecutor(1) as thread:  # the one who happens to come first, comes first
                steps = [thread.submit(_step, execution, name, done) for name in order]
                for step in steps:
                    step.result(PATIENCE)
            raise InterruptedError

        return run

    for order in (["a", "b"], ["b", "a"]):
        with pytest.raises(
            ImproperlyConfigured, match=r"'[ab]' was started outside of the handler's thread"
        ):
            attempt(operation, handler(order))
    assert done == []


def _step(execution: ExecutionContext, name: str, done: list[str]) -> None:
    try:
        execution.step(name, done.append, name)
    finally:
        connections.close_all()


def test_threads_within_a_step() -> None:
    """What a step does in threads of its own is its own affair."""

    def work() -> list[int]:
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(lambda n: n * 2, [1, 2]))

    wanted = an_operation(lease=30 * SECOND)
    assert attempt(wanted, lambda e: e.step("work", work)) == Executed([2, 4])
