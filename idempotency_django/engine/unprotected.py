"""What a handler can use of an operation that runs although its store cannot be reached."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async

from ..records import Claim, Operation
from ..stores import Store
from .context import ExecutionContext
from .steps import as_json


class Unprotected(ExecutionContext):
    """What a handler gets if its store cannot be reached and it runs nevertheless.

    Nothing is claimed and nothing is kept: steps are just called. ``derive_key()`` returns the same
    keys as always, so calls of a service that honours them stay safe.
    """

    def __init__(self, store: Store, operation: Operation) -> None:
        super().__init__(store, Claim(operation, 1, ""), None)

    def atomic(self) -> AbstractContextManager[None]:
        return super().atomic() if self._store.supports_transactions else nullcontext()

    def step(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return json.loads(as_json(name, function(*args, **kwargs)))

    async def astep(
        self,
        name: str,
        function: Callable[..., Any] | Callable[..., Awaitable[Any]],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if iscoroutinefunction(function):
            return json.loads(as_json(name, await function(*args, **kwargs)))
        return await sync_to_async(self.step)(name, function, *args, **kwargs)
