"""Steps in threads of the handler's, and threads within a step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
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


def test_steps_in_threads() -> None:
    """Threads of the handler's may begin steps, each time in another order."""
    operation, done = an_operation(lease=30 * SECOND), []

    def handler(execution: ExecutionContext) -> list[object]:
        names = "abc" if execution.attempt == 1 else "cab"
        with ThreadPoolExecutor(1) as thread:
            steps = [thread.submit(_step, execution, name, done) for name in names]
            results = [step.result(PATIENCE) for step in steps]
        if execution.attempt == 1:
            raise InterruptedError
        return results

    with pytest.raises(InterruptedError):
        attempt(operation, handler)
    assert attempt(operation, handler) == Executed([None] * 3)
    assert sorted(done) == ["a", "b", "c"]


def test_two_threads_with_one_name() -> None:
    """Of two threads that call one step at once, the second is refused before it runs."""
    done: list[str] = []
    begun, refused = Event(), Event()

    def wait() -> None:
        done.append("a")
        begun.set()
        assert refused.wait(PATIENCE)

    def handler(execution: ExecutionContext) -> None:
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(_in_thread, execution.step, "a", wait)
            assert begun.wait(PATIENCE)
            with pytest.raises(ValueError, match="two steps with the name 'a'"):
                execution.step("a", wait)
            refused.set()
            first.result(PATIENCE)

    assert isinstance(attempt(an_operation(lease=30 * SECOND), handler), Executed)
    assert done == ["a"]


def _step(execution: ExecutionContext, name: str, done: list[str]) -> object:
    return _in_thread(execution.step, name, done.append, name)


def _in_thread(function: Any, *args: Any) -> object:
    try:
        return function(*args)
    finally:
        connections.close_all()
