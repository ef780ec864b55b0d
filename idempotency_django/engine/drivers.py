"""Sync and async drivers of the leased flow: one blocks, the other one awaits.

A flow is a coroutine that is written once and awaits nothing but its driver.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import sync_to_async

from ..records import Payload
from .context import CURRENT, ExecutionContext
from .outcomes import Result

P = ParamSpec("P")
T = TypeVar("T")


class Driver(ABC):
    """Runs the handler of one flow, and whatever else in it takes time.

    Attributes:
        begun: whether the handler was begun.
        result: the handler's result; ``None``: none so far.
    """

    def __init__(self) -> None:
        self.begun = False
        self.result: Result | None = None

    @property
    def payload(self) -> Payload | None:
        """The part of the handler's result that is to be stored; ``None``: nothing, so far."""
        payload = self.result.payload if self.result else None
        return payload if isinstance(payload, Payload) else None

    @abstractmethod
    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that may ask a store or a database."""

    @abstractmethod
    async def execute(self, execution: ExecutionContext) -> Result:
        """Run the handler."""

    @abstractmethod
    async def pause(self, seconds: float, *, to_the_end: bool = False) -> None:
        """Wait; to the end, even after a cancellation, if what was done must still be stored."""


class Blocking(Driver):
    """Does everything at once, in the caller's thread.

    Args:
        handler: the handler.
    """

    def __init__(self, handler: Callable[[ExecutionContext], Result]) -> None:
        super().__init__()
        self._handler = handler

    def run(self, flow: Coroutine[Any, Any, T]) -> T:
        """The result of a flow, which never suspends."""
        try:
            flow.send(None)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        raise AssertionError

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    async def execute(self, execution: ExecutionContext) -> Result:
        self.begun = True
        token = CURRENT.set(execution)
        try:
            self.result = self._handler(execution)
        except (StopIteration, GeneratorExit) as error:
            raise _misused(error) from error
        finally:
            CURRENT.reset(token)
        return self.result

    async def pause(self, seconds: float, *, to_the_end: bool = False) -> None:
        time.sleep(seconds)


class Awaiting(Driver):
    """Leaves the event loop to others meanwhile; functions are called in a thread.

    A cancellation ends the handler at once, or prevents its start. A call of the store is finished
    first: otherwise it could make a claim without an owner.

    Args:
        handler: the handler, a coroutine function.
    """

    def __init__(self, handler: Callable[[ExecutionContext], Awaitable[Result]]) -> None:
        super().__init__()
        self._handler = handler
        self._cancellations: list[asyncio.CancelledError] = []

    async def run(self, flow: Coroutine[Any, Any, T]) -> T:
        """The result of a flow; a cancellation that it did not end with is raised after it."""
        try:
            result = await flow
        except Exception:
            if self._cancellations:
                raise self._cancellations[0]  # noqa: B904  # the error is its context
            raise
        if self._cancellations:
            raise self._cancellations[0]
        return result

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._finished(sync_to_async(function)(*args, **kwargs))

    async def execute(self, execution: ExecutionContext) -> Result:
        self._end_if_cancelled()
        self.begun = True
        token, task = CURRENT.set(execution), asyncio.current_task()
        try:
            self.result = await self._handler(execution)
        except GeneratorExit as error:
            if not _is_running(task):  # the coroutine is being closed, and may await no more
                raise
            raise _misused(error) from error
        finally:
            with suppress(ValueError):  # it is being closed in another context, which has no token
                CURRENT.reset(token)
        return self.result

    async def pause(self, seconds: float, *, to_the_end: bool = False) -> None:
        if to_the_end:
            await self._finished(asyncio.sleep(seconds))
            return
        self._end_if_cancelled()
        await asyncio.sleep(seconds)

    def _end_if_cancelled(self) -> None:
        if self._cancellations:
            raise self._cancellations.pop()

    async def _finished(self, work: Awaitable[T]) -> T:
        """The result of something that a cancellation must not interrupt."""
        task = asyncio.ensure_future(work)
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                if not task.cancelled():
                    self._cancellations.append(error)
            except BaseException:  # noqa: BLE001, S110  # it is in the task
                pass
        return task.result()


def _misused(error: BaseException) -> RuntimeError:
    """The error of a handler that raised what a coroutine, such as a flow, must not raise."""
    return RuntimeError(
        f"The handler raised {type(error).__name__}, which Python keeps for the end of iterators "
        "and generators. Raise another exception, or give next() a default."
    )


def _is_running(task: asyncio.Task[Any] | None) -> bool:
    """Whether this is the code of a task that the event loop runs now."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:
        return False  # no loop runs: the garbage collector has called
