"""The guarantees for the jobs of any queue: :func:`idempotent_job` runs a function once per key."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date
from decimal import Decimal
from enum import Enum
from functools import wraps
from typing import Any, Final, TypeVar, cast
from uuid import UUID

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured

from ..engine import aidempotent_call, idempotent_call
from ..policy import Policy, canonical, keys, scopes

KeyRule = str | Callable[..., object]
"""Names the operation of a call: a template such as ``"order-{order_id}"``, or a callable that
takes the job's arguments."""

_NAMING: Final = (str, int, float, Decimal, UUID, date, Enum)
"""The types of values with the same text in every process."""


def key_of(
    rule: KeyRule,
    job: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str:
    """The key of a call.

    Args:
        rule: names the operation.
        job: the job's name, for errors.
        function: what the job calls; its signature says which argument is which.
        args: positional arguments.
        kwargs: keyword arguments.

    Raises:
        TypeError: the arguments do not fit, or the key is made of something that names nothing.
        ValueError: the key would be made of an empty value.
    """
    if callable(rule):
        return keys.fit(_text(rule(*args, **kwargs), f"The key of {job}"))
    bound = _bound(job, function, args, kwargs)
    bound.apply_defaults()
    return keys.fit(_Template(job).vformat(rule, (), bound.arguments))


def check_rule(rule: KeyRule, job: str, function: Callable[..., Any]) -> None:
    """Check when the job is declared what would fail when it is called.

    Raises:
        ImproperlyConfigured: the template names what is not an argument of the function, or the
            rule is :func:`~idempotency_django.policy.keys.generated`.
    """
    if rule is keys.generated:
        raise ImproperlyConfigured(
            f"The key of {job} is keys.generated, which makes a new key for each call, so each "
            "retry would run again. Make the key of the arguments, such as 'order-{order_id}'."
        )
    if callable(rule):
        return
    arguments = inspect.signature(function).parameters
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(rule) if field is not None]
    except ValueError as error:
        raise ImproperlyConfigured(
            f"The key {rule!r} of {job} is not a template: {error}. Write it as "
            "'order-{order_id}'."
        ) from None
    for field in fields:
        name = field.partition(".")[0].partition("[")[0]
        if name not in arguments:
            raise ImproperlyConfigured(
                f"The key {rule!r} of {job} names {name!r}, which is not one of its arguments: "
                f"{', '.join(arguments) or 'it has none'}."
            )


def _bound(
    job: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    try:
        return inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"The arguments do not match {job}: {error}.") from None


def fingerprint_of(
    job: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    exclude: Collection[str] = (),
) -> Any:
    """The fingerprint of a call, as plain data: equal however its arguments are passed.

    Defaults do not count, so that a default that a new version changes refuses no retry of a call
    that the old version began.

    Args:
        job: the job's name, for errors.
        function: what the job calls; its signature says which argument is which.
        args: positional arguments.
        kwargs: keyword arguments.
        exclude: names of arguments that do not count.

    Raises:
        TypeError: the arguments do not fit, or one of them is not plain data.
    """
    bound = _bound(job, function, args, kwargs)
    for name in exclude:
        if name in bound.arguments:
            bound.arguments[name] = None
    for name, value in bound.arguments.items():
        try:
            canonical(value)
        except TypeError as error:
            raise TypeError(
                f"The argument {name!r} of {job} cannot be compared with a retry's. {error}"
            ) from None
    return (bound.args, bound.kwargs)


def _text(value: object, what: str) -> str:
    if not isinstance(value, _NAMING) or isinstance(value, bool):
        raise TypeError(
            f"{what} contains {value!r} ({type(value).__name__}), which doesn't identify an "
            "operation. Use strings, numbers, UUIDs or dates, for example a primary key."
        )
    text = str(value.value if isinstance(value, Enum) else value)
    if not text:
        raise ValueError(
            f"{what} contains an empty string, so different operations would share it."
        )
    return text


class _Template(string.Formatter):
    """Fills in a template, and refuses values that name nothing."""

    def __init__(self, job: str) -> None:
        self._job = job

    def format_field(self, value: Any, format_spec: str) -> str:
        text = _text(value, f"The key of {self._job}")
        return format(value, format_spec) if format_spec else text


Job = TypeVar("Job", bound=Callable[..., Any])


def idempotent_job(
    *,
    key: KeyRule,
    policy: Policy | None = None,
    scope: str = "",
    name: str = "",
    exclude: Collection[str] = (),
) -> Callable[[Job], Job]:
    """Run a job's function once per key; a message that is delivered again gets the first result.

    ::

        @task  # Django's tasks; dramatiq, rq and procrastinate alike
        @idempotent_job(key="order-{order_id}", policy=Policy(mode="leased"))
        def pay(order_id):
            execution = current_execution()
            return execution.step("charge", provider.charge, order_id)

    It goes below the decorator of the queue. The function may be a coroutine function.

    Args:
        key: the operation that a call names: a template of its arguments, or a callable that takes
            the same arguments and returns a text, a number or a UUID. A key that is longer than 255
            characters, or not visible ASCII, is replaced by its digest.
        policy: the policy; by default the project's.
        scope: the namespace that the key is unique in; by default the job's own,
            ``"job:<name>"``.
        name: the job's name; by default the function's module and name. Give one that stays when
            the function is renamed or moved.
        exclude: names of arguments that are not part of what is asked for, such as a context that
            the queue passes.

    Raises:
        ImproperlyConfigured: the template names what is not an argument of the function, or the
            key is ``keys.generated``.

    The decorated function returns what the function returned first, as it reads back from JSON. It
    raises what :func:`~idempotency_django.engine.functions.idempotent_call` raises; and:

    Raises:
        OperationInProgress: another delivery is being executed. Let the queue deliver it again
            later, or give the policy ``on_conflict="wait"``.
        TypeError: an argument is not plain data, so that a retry could not be recognised.
    """

    def decorate(function: Job) -> Job:
        job = name or f"{function.__module__}.{function.__qualname__}"
        check_rule(key, job, function)

        def options_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
            return {
                "key": key_of(key, job, function, args, kwargs),
                "scope": scope or scopes.fit(f"job:{job}"),
                "fingerprint": fingerprint_of(job, function, args, kwargs, exclude),
                "name": job,
                "policy": policy,
            }

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return idempotent_call(lambda _: function(*args, **kwargs), **options_of(args, kwargs))

        @wraps(function)
        async def arun(*args: Any, **kwargs: Any) -> Any:
            call = aidempotent_call(lambda _: function(*args, **kwargs), **options_of(args, kwargs))
            return await call

        return cast(Job, arun if iscoroutinefunction(function) else run)

    return decorate
