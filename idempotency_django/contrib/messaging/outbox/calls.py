"""Calls of functions as messages: signed, so that who can write the table cannot choose them."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from inspect import isasyncgenfunction, isgeneratorfunction
from typing import Any, Final, Self

from asgiref.sync import iscoroutinefunction
from django.core.signing import BadSignature, Signer

from ....engine import ExecutionContext, plan_call, run_plan
from ....policy import Policy, digest
from ..brokers.base import Outgoing, Publisher, Refused, result_of
from ..consumers import without_exits
from ..databases import database
from ..models import MessageState, OutboxMessage
from .publishing import ContentId, as_json, dedup_of, publish, refuse_autocommit
from .topics import topic

logger = logging.getLogger("idempotency_django")

TOPIC: Final = "after_commit"


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
    call = Call.of(function, args, kwargs)
    refuse_autocommit(database(), "after_commit")
    return publish(TOPIC, call.signed(), type=call.path)


SCOPE: Final = "call:after_commit"
"""The scope of the records of calls; the key is the message's id."""

_LAZY: Final = (iscoroutinefunction, isgeneratorfunction, isasyncgenfunction)
_METHOD: Final = "CALL"
_POLICY: Final = Policy(mode="leased", ttl=timedelta(days=30))


@dataclass(frozen=True, slots=True)
class Call:
    """A function and its arguments.

    Attributes:
        path: ``"shop.mails:send_receipt"``.
        args: positional arguments, as they read back from JSON.
        kwargs: keyword arguments, likewise.
    """

    path: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Self:
        """The call of a function that another process can find.

        Raises:
            TypeError: it cannot be found by its name, it does not take these arguments, or one of
                them is not JSON.
        """
        path = _path(function)
        named: list[tuple[int | str, Any]] = [*enumerate(args, 1), *kwargs.items()]
        for name, value in named:
            _refuse_other_than_json(path, name, value)
        _refuse_unfit(path, function, args, kwargs)
        return cls(path, list(args), dict(kwargs))

    @classmethod
    def read(cls, path: str, data: Any) -> Self:
        """The call in a message.

        Raises:
            Refused: another process has written it, or ``SECRET_KEY`` has changed.
        """
        try:
            call = cls(path, data["args"], data["kwargs"])
            signature = data["signature"]
        except (KeyError, TypeError) as error:
            why = "The message was not written by after_commit()."
            raise Refused(why, final=True) from error
        try:
            _signer().unsign(f"{call._text}:{signature}")
        except BadSignature as error:
            raise Refused(
                f"The call of {path} is not signed with SECRET_KEY or one of "
                "SECRET_KEY_FALLBACKS. If the key was replaced, add the old key to the fallbacks. "
                "Otherwise, find out which program has written the message.",
                final=True,
            ) from error
        return call

    def signed(self) -> dict[str, Any]:
        """The signed data of the call in its message, besides the path."""
        signature = _signer().signature(self._text)
        return {"args": self.args, "kwargs": self.kwargs, "signature": signature}

    def run_once(self, message_id: str, caused_by: str, *, max_attempts: int | None = None) -> None:
        """Call the function, unless it was called for this message before.

        Args:
            message_id: the key of the call.
            caused_by: the reference of the message.
            max_attempts: after how many attempts not to call it again if the last one has ended its
                process; ``None``: it is called again.

        Raises:
            Refused: it is not called again. The next attempt calls it, if an operator asks for one.
            OperationInProgress: another process is calling it.
            OperationHeld: it was interrupted, and an operator must settle it.
            StoreUnavailable: whether it was called is unknown.
            ImportError: the function's module cannot be imported.
            LookupError: there is no such function any more.
            Exception: an error of the function.
        """
        function = found(self.path)
        plan = plan_call(
            _POLICY.resolved(),
            key=message_id,
            scope=SCOPE,
            name=self.path,
            content_digest=digest(self._text),
            method=_METHOD,
            caused_by=caused_by,
        )

        def call(execution: ExecutionContext) -> None:
            begun = execution.attempt - 1
            if max_attempts is not None and begun >= max_attempts and execution.interrupted:
                raise Refused(
                    f"Attempt {begun} at the call of {self.path} ended its process, for example "
                    "because it ran out of memory. It is not retried automatically. Correct the "
                    "function, and retry the message in the admin.",
                    final=True,
                )
            with without_exits():
                function(*self.args, **self.kwargs)

        run_plan(plan, call)

    @property
    def _text(self) -> str:
        return json.dumps([self.path, self.args, self.kwargs], sort_keys=True)


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
        for part in name.split("."):
            place = getattr(place, part)
    except AttributeError:
        raise LookupError(
            f"The function {path} no longer exists. It was removed or renamed while a call was "
            "waiting. Restore it under this name, or discard the message."
        ) from None
    function: Callable[..., Any] = place
    return function


def _signer() -> Signer:
    return Signer(salt="idempotency_django.contrib.messaging.outbox.calls")


def _path(function: Callable[..., Any]) -> str:
    module, name = (getattr(function, each, "") for each in ("__module__", "__qualname__"))
    path = f"{module}:{name}"
    if any(is_lazy(function) for is_lazy in _LAZY):
        raise TypeError(
            f"{path} is a coroutine function or a generator function, which after_commit() cannot "
            "run. Pass a plain function."
        )
    try:
        is_found = "<" not in name and module != "__main__" and found(path) == function
    except (ImportError, LookupError):
        is_found = False
    if not is_found:
        raise TypeError(
            f"after_commit() cannot call {function!r}, because another process cannot import it. "
            "Pass a function at the top of a module, not a lambda, a nested function, a partial "
            "or a method of an object."
        )
    return path


def _refuse_unfit(
    path: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Refuse arguments that the function does not take, while their caller can be seen."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a callable that does not tell its signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"after_commit() cannot call {path}{signature}: {error}.") from None


def _refuse_other_than_json(path: str, name: int | str, value: Any) -> None:
    try:
        as_json(value)
    except ValueError as error:
        raise TypeError(
            f"The argument {name!r} of {path} is not JSON: {error}. Pass strings, numbers, lists "
            "and dicts, and a primary key instead of an object."
        ) from error


class CallPublisher(Publisher):
    """Calls the function of each message, in the process of the relay, one after the other."""

    def send(self, message: Outgoing) -> Exception | None:
        most = topic(self.topic).max_attempts

        def call() -> None:
            read = Call.read(message.type, message.data)
            read.run_once(message.message_id, message.reference, max_attempts=most)

        return result_of(call)


CELERY_TOPIC: Final = "celery"


def enqueue(
    task: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dedup_id: str | None,
    window: timedelta | None,
    unfinished: Callable[[], bool],
) -> str:
    """Write the message of a task; see :class:`~idempotency_django.contrib.jobs.Enqueue`."""
    using = database()
    refuse_autocommit(using, "enqueue_once")
    data = {"args": [*args], "kwargs": {**kwargs}}
    if dedup_id is None:
        return publish(CELERY_TOPIC, data, type=task)
    names = ContentId(dedup_id)
    sent = OutboxMessage.objects.using(using).filter(
        dedup=dedup_of(CELERY_TOPIC, names), state=MessageState.DONE
    )
    if sent.exists() and unfinished():
        sent.update(dedup=None)
    return publish(CELERY_TOPIC, data, type=task, dedup_id=names, window=window)
