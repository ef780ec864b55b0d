"""What a handler can use where nothing is claimed: its store is away, or there is no key."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

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


class WithoutKey:
    """What a leased handler gets with a request without a key, where its key is optional.

    It is false. Whatever needs a key says so; ``atomic()`` is an ordinary transaction.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __bool__(self) -> bool:
        return False

    def atomic(self) -> AbstractContextManager[None]:
        """A transaction on the store's database, which nothing fences."""
        using = self._store.using
        return nullcontext() if using is None else transaction.atomic(using=using)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in dir(ExecutionContext):
            raise AttributeError(name)
        raise ImproperlyConfigured(
            f"request.idempotency.{name} needs an idempotency key, and this request has none: the "
            "view's policy leaves it optional. Give the policy required=True, or ask first: "
            "request.idempotency is false without a key."
        )
