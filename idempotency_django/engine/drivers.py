"""What a flow of the engine wants next, and who does it, synchronously or not.

A flow is a generator that is written once: :func:`drive` does what it wants, :func:`adrive` awaits
it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async

from ..records import Payload
from ..stores import Store
from .context import ExecutionContext
from .outcomes import Outcome, Result


@dataclass(frozen=True, slots=True)
class Ask:
    """Call the store's method of that name."""

    method: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Execute:
    """Run the handler.

    Attributes:
        execution: what it gets.
        begun: whether it was begun; noted by whoever runs it.
        answer: its result, likewise; ``None``: none so far.
    """

    execution: ExecutionContext
    begun: bool = False
    answer: Result | None = None

    @property
    def payload(self) -> Payload | None:
        """What is to be stored of its answer; ``None``: nothing, so far or at all."""
        made = self.answer.payload if self.answer else None
        return made if isinstance(made, Payload) else None


@dataclass(frozen=True, slots=True)
class Call:
    """Call a function that may ask the database."""

    function: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait; to the end, even after a cancellation, if what was done must still be stored."""

    seconds: float
    to_the_end: bool = False


class RolledBack(Exception):  # carries an answer out of a transaction; no error
    """Raised by a flow to roll back what surrounds an answer that is not kept."""

    def __init__(self, answer: Result) -> None:
        super().__init__(answer.error)
        self.answer = answer


Wish = Ask | Execute | Call | Pause
Flow = Generator[Wish, Any, Outcome]


def drive(flow: Flow, store: Store, execute: Callable[[ExecutionContext], Result]) -> Outcome:
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


def _granted(store: Store, wish: Wish, execute: Callable[[ExecutionContext], Result]) -> Any:
    match wish:
        case Ask(method, arguments, options):
            return getattr(store, method)(*arguments, **options)
        case Execute(execution):
            wish.begun = True
            wish.answer = execute(execution)
            return wish.answer
        case Call(function):
            return function()
        case Pause(seconds):
            return time.sleep(seconds)


async def adrive(
    flow: Flow, store: Store, execute: Callable[[ExecutionContext], Awaitable[Result]]
) -> Outcome:
    """Await what the flow wants, to its end.

    A cancellation ends the handler at once, or prevents its start. A call of the store is finished
    first: otherwise it could make a claim that nobody knows of.
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
    execute: Callable[[ExecutionContext], Awaitable[Result]],
    cancelled: list[asyncio.CancelledError],
) -> Any:
    match wish:
        case Ask(method, arguments, options):
            asked = getattr(store, f"a{method}")(*arguments, **options)
            return await _finished(asked, cancelled)
        case Call(function):
            return await _finished(sync_to_async(function)(), cancelled)
        case Pause(seconds, to_the_end=True):
            return await _finished(asyncio.sleep(seconds), cancelled)
    if cancelled:
        raise cancelled.pop()
    match wish:
        case Execute(execution):
            wish.begun = True
            wish.answer = await execute(execution)
            return wish.answer
        case Pause(seconds):
            return await asyncio.sleep(seconds)


async def _finished(asked: Awaitable[Any], cancelled: list[asyncio.CancelledError]) -> Any:
    """The result of something that a cancellation must not interrupt."""
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
