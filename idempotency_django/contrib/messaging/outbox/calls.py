"""Calls of functions as messages: signed, so that who can write the table cannot choose them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from inspect import isasyncgenfunction, isgeneratorfunction
from typing import Any, Final

from asgiref.sync import iscoroutinefunction
from django.core.signing import BadSignature, Signer

from ....engine import ExecutionContext, plan_call, run_plan
from ....policy import Policy, digest
from ..brokers.base import HANDLER_OUTAGES, Publisher, Refused
from ..consumers import without_exits
from ..events import Event
from .publishing import as_json, publish
from .topics import topic

TOPIC: Final = "after_commit"
SCOPE: Final = "call:after_commit"
"""The scope of the records of calls; the key is the message's id."""

_LAZY: Final = (iscoroutinefunction, isgeneratorfunction, isasyncgenfunction)
_METHOD: Final = "CALL"
_POLICY: Final = Policy(mode="leased", ttl=timedelta(days=30))


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


class CallPublisher(Publisher):
    """Calls the function of each message, in the process of the relay, one after the other."""

    def send(self, message: Event) -> None:
        _call(message)

    def is_outage(self, error: Exception) -> bool:
        return isinstance(error, HANDLER_OUTAGES)


def _call(message: Event) -> None:
    """Call the function of a message, unless it was called for this message before.

    Raises:
        Refused: another process has written it, or ``SECRET_KEY`` has changed; or it is not called
            again, unless an operator asks for one more attempt.
        OperationInProgress: another process is calling it.
        OperationHeld: it was interrupted, and an operator must settle it.
        StoreUnavailable: whether it was called is unknown.
        ImportError: the function's module cannot be imported.
        LookupError: there is no such function any more.
        Exception: an error of the function.
    """
    path, data, most = message.type, message.data, topic(TOPIC).max_attempts
    try:
        text, args, kwargs = _text(path, data), data["args"], data["kwargs"]
        _signer().unsign(f"{text}:{data['signature']}")
    except (KeyError, TypeError, BadSignature) as error:
        raise Refused(
            f"The call of {path} is not signed with SECRET_KEY or one of SECRET_KEY_FALLBACKS. If "
            "the key was replaced, add the old key to the fallbacks. Otherwise, find out which "
            "program has written the message.",
            final=True,
        ) from error
    function = found(path)
    plan = plan_call(
        _POLICY.resolved(),
        key=message.id,
        scope=SCOPE,
        name=path,
        content_digest=digest(text),
        method=_METHOD,
        caused_by=message.caused_by,
    )

    def call(execution: ExecutionContext) -> None:
        begun = execution.attempt - 1
        if begun >= most and execution.interrupted:
            raise Refused(
                f"Attempt {begun} at the call of {path} ended its process, for example because it "
                "ran out of memory. It is not retried automatically. Correct the function, and "
                "retry the message in the admin.",
                final=True,
            )
        with without_exits():
            function(*args, **kwargs)

    run_plan(plan, call)
