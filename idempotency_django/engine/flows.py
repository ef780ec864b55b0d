"""One flow for sync and async callers: a coroutine that awaits nothing but its driver.

A flow is written once. The driver of a sync caller blocks and never suspends, so that
:func:`finish` gets the result at once; that of an async caller awaits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import sync_to_async

P = ParamSpec("P")
T = TypeVar("T")


def finish(flow: Coroutine[Any, Any, T]) -> T:
    """The result of a flow whose driver blocks."""
    try:
        flow.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError


class Blocking:
    """Calls plain functions at once, in the caller's thread."""

    cancelled: asyncio.CancelledError | None = None

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a function, which may ask a store or a database."""
        return function(*args, **kwargs)

    async def pause(self, seconds: float) -> None:
        """Wait so long."""
        time.sleep(seconds)


class Awaiting:
    """Calls plain functions in a thread, so that the event loop is left to others.

    A cancellation waits for the end of a call. One that claims an operation would otherwise leave a
    claim without an owner.

    Attributes:
        cancelled: a cancellation that came during a call, to raise where nothing is interrupted.
    """

    def __init__(self) -> None:
        self.cancelled: asyncio.CancelledError | None = None

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a function, which may ask a store or a database."""
        task = asyncio.ensure_future(sync_to_async(function)(*args, **kwargs))
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                self.cancelled = error
        return task.result()

    async def pause(self, seconds: float) -> None:
        """Wait so long, unless it was cancelled."""
        if self.cancelled:
            raise self.cancelled
        await asyncio.sleep(seconds)
