"""Calls of functions as messages: signed, so that who can write the table cannot choose them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from inspect import isasyncgenfunction, isgeneratorfunction
from typing import Any, Final

from asgiref.sync import iscoroutinefunction
from django.core.signing import BadSignature, Signer

from ....engine import ExecutionContext
from ....policy import Policy
from ..brokers.base import Refused
from ..consumers import ANY, Consumer, Duplicate, Handled
from ..events import Event
from .publishing import as_json, publish
from .topics import topic

TOPIC: Final = "after_commit"

_LAZY: Final = (iscoroutinefunction, isgeneratorfunction, isasyncgenfunction)


def after_commit(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> str:
    """Have a relay call the function once the transaction is committed. ::

        with transaction.atomic():
            order.pay()
            after_commit(send_receipt, order.pk)

        def send_receipt(order_id):
            key = current_execution().derive_key("receipt")
            mail.send(order_id, idempotency_key=key)

    The call is a message of the outbox, so nothing is lost where a process dies after the commit,
    and nothing happens after a rollback. It runs in the leased mode, in no transaction: one caller
    at a time, and not again once the function's return is recorded. A call that fails or is
    interrupted is repeated, with the same derived keys and without the steps that are done.

    Args:
        function: a function at the top of a module; what it returns is not kept.
        args: positional arguments: what JSON can say.
        kwargs: keyword arguments, likewise.

    Returns:
        The id of the message, which is also the key of the call's record.

    Raises:
        ImproperlyConfigured: no transaction is open on the database of the outbox.
        TypeError: another process would not find the function by its name, it does not take these
            arguments, or one of them is not JSON.
    """
    path = _path(function)
    with suppress(ValueError):  # a built-in function that does not tell its signature
        inspect.signature(function).bind(*args, **kwargs)
    arguments = {"args": [*args], "kwargs": kwargs}
    try:
        as_json(arguments)
    except ValueError as error:
        raise TypeError(
            f"An argument of {path} is not JSON: {error}. Pass strings, numbers, lists and dicts, "
            "and a primary key instead of an object."
        ) from error
    signature = _signer().signature(_text(path, arguments))
    return publish(TOPIC, {**arguments, "signature": signature}, type=path)


def _text(path: str, arguments: Mapping[str, Any]) -> str:
    """What is signed of a call."""
    return json.dumps([path, arguments["args"], arguments["kwargs"]], sort_keys=True)


def _signer() -> Signer:
    return Signer(salt="idempotency_django.contrib.messaging.outbox.calls")


def _path(function: Callable[..., Any]) -> str:
    """The path of a function that another process can call by it, ``"shop.mails:send_receipt"``."""
    module, name = (getattr(function, each, "") for each in ("__module__", "__qualname__"))
    path = f"{module}:{name}"
    if any(is_lazy(function) for is_lazy in _LAZY):
        raise TypeError(
            f"{path} is a coroutine function or a generator function, which after_commit() cannot "
            "run. Pass a plain function."
        )
    try:
        is_found = module != "__main__" and found(path) == function
    except (ImportError, LookupError):
        is_found = False
    if not is_found:
        raise TypeError(
            f"after_commit() cannot call {function!r}, because another process cannot import it. "
            "Pass a function at the top of a module, not a lambda, a nested function, a partial "
            "or a method of an object."
        )
    return path


def found(path: str) -> Callable[..., Any]:
    """The function at a path.

    Raises:
        ImportError: its module cannot be imported.
        LookupError: there is no such function in it.
    """
    module, _, name = path.partition(":")
    try:
        place: Any = import_module(module)
    except Exception as error:  # importing can raise anything
        raise ImportError(f"The module {module!r} cannot be imported: {error!r}") from error
    try:
        function: Callable[..., Any] = getattr(place, name)
    except AttributeError:
        raise LookupError(
            f"The function {path} no longer exists. It was removed or renamed while a call was "
            "waiting. Restore it under this name, or discard the message."
        ) from None
    return function


class _Calls(Consumer):
    """Looks for the function of a call first: where it cannot be called, no attempt begins."""

    def handle(self, event: Event, *, redelivered: bool = False) -> Handled | Duplicate:
        _function_of(event)
        return super().handle(event, redelivered=redelivered)


CALLS: Final = _Calls(TOPIC, max_attempts=None, policy=Policy(mode="leased"))
"""Calls the function of each message of the topic, in the process of the relay."""


@CALLS.on(ANY)
def call(event: Event, execution: ExecutionContext) -> None:
    """Call the function that a message names; the relay counts the attempts that fail."""
    begun = execution.attempt - 1
    if execution.interrupted and begun >= topic(TOPIC).max_attempts:
        raise Refused(
            f"Attempt {begun} at the call of {event.type} ended its process, for example because "
            "it ran out of memory. It is not retried automatically. Correct the function, and "
            "retry the message in the admin.",
            final=True,
        )
    _function_of(event)(*event.data["args"], **event.data["kwargs"])


def _function_of(message: Event) -> Callable[..., Any]:
    """The function that a message names.

    Raises:
        Refused: another program has written it, or ``SECRET_KEY`` has changed.
        ImportError: the function's module cannot be imported.
        LookupError: there is no such function any more.
    """
    path, data = message.type, message.data
    try:
        _signer().unsign(f"{_text(path, data)}:{data['signature']}")
    except (KeyError, TypeError, BadSignature) as error:
        raise Refused(
            f"The call of {path} is not signed with SECRET_KEY or one of SECRET_KEY_FALLBACKS. If "
            "the key was replaced, add the old key to the fallbacks. Otherwise, find out which "
            "program has written the message.",
            final=True,
        ) from error
    return found(path)
