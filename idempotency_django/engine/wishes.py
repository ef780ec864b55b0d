"""What a flow of the engine wants done next, and who does it, synchronously or not.

A flow is a generator that is written once: :func:`drive` does what it wants, :func:`adrive` awaits
it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async

from ..executions import Execution
from ..stores import Store
from .outcomes import Answer, Outcome


@dataclass(frozen=True, slots=True)
class Ask:
    """Call the store's method of that name."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Execute:
    """Run the handler."""

    execution: Execution


@dataclass(frozen=True, slots=True)
class Call:
    """Call a function that may ask the database."""

    function: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait; to the end, whatever is cancelled, where what was done must still be stored."""

    seconds: float
    to_the_end: bool = False


Wish = Ask | Execute | Call | Pause
Flow = Generator[Wish, Any, Outcome]


def drive(flow: Flow, store: Store, execute: Callable[[Execution], Answer]) -> Outcome:
    """Do what the flow wants, to its end."""
    advance: Callable[[], Wish] = partial(next, flow)
    while True:
        try:
            wish = advance()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        try:
            advance = partial(flow.send, _granted(store, wish, execute))
        except BaseException as error:  # noqa: BLE001  # it is the flow's to handle
            advance = partial(flow.throw, error)


def _granted(store: Store, wish: Wish, execute: Callable[[Execution], Answer]) -> Any:
    match wish:
        case Ask(method, arguments):
            return getattr(store, method)(*arguments)
        case Execute(execution):
            return execute(execution)
        case Call(function):
            return function()
        case Pause(seconds):
            return time.sleep(seconds)


async def adrive(
    flow: Flow, store: Store, execute: Callable[[Execution], Awaitable[Answer]]
) -> Outcome:
    """Await what the flow wants, to its end.

    A cancellation ends the handler, or keeps it from being begun, at once. What the store was asked
    is finished first: half-asked, a claim could be made that nobody knows of.
    """
    advance: Callable[[], Wish] = partial(next, flow)
    cancelled: list[asyncio.CancelledError] = []
    while True:
        try:
            wish = advance()
        except StopIteration as end:
            if cancelled:
                raise cancelled[0] from None
            return end.value  # type: ignore[no-any-return]
        except Exception:
            if cancelled:
                raise cancelled[0]  # noqa: B904  # the error is its context
            raise
        try:
            value = await _awaited(store, wish, execute, cancelled)
            advance = partial(flow.send, value)
        except BaseException as error:  # noqa: BLE001  # it is the flow's to handle
            advance = partial(flow.throw, error)


async def _awaited(
    store: Store,
    wish: Wish,
    execute: Callable[[Execution], Awaitable[Answer]],
    cancelled: list[asyncio.CancelledError],
) -> Any:
    match wish:
        case Ask(method, arguments):
            return await _finished(getattr(store, f"a{method}")(*arguments), cancelled)
        case Call(function):
            return await _finished(sync_to_async(function)(), cancelled)
        case Pause(seconds, to_the_end=True):
            return await _finished(asyncio.sleep(seconds), cancelled)
    if cancelled:
        raise cancelled.pop()
    match wish:
        case Execute(execution):
            return await execute(execution)
        case Pause(seconds):
            return await asyncio.sleep(seconds)


async def _finished(asked: Awaitable[Any], cancelled: list[asyncio.CancelledError]) -> Any:
    """The result of something that a cancellation must not tear apart."""
    task = asyncio.ensure_future(asked)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if not task.cancelled():
                cancelled.append(error)
        except BaseException:  # noqa: BLE001, S110  # it is in the task
            pass
    return task.result()
