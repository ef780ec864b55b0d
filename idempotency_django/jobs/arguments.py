"""What a job is called with: the key of its operation, and its arguments as plain data."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any, Final
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured

from ..policy import keys
from ..policy.canonical import canonical

KeyRule = str | Callable[..., object]
"""Names the operation of a call: a template such as ``"order-{order_id}"``, or a callable that
takes the job's arguments."""

_NAMING: Final = (str, int, float, Decimal, UUID, date, Enum)
"""The types of values that name something: their text is the same in every process."""


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
        ImproperlyConfigured: the template names what is not an argument of the function.
    """
    if callable(rule):
        return
    arguments = inspect.signature(function).parameters
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(rule) if field is not None]
    except ValueError as error:
        raise ImproperlyConfigured(
            f"The key {rule!r} of {job} is no template: {error}. Write it as 'order-{{order_id}}'."
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
        raise TypeError(f"The arguments do not fit {job}: {error}.") from None


def fingerprint_of(
    job: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    exclude: Collection[str] = (),
) -> Any:
    """What a call asks for, as plain data: equal however its arguments are passed.

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
                f"The argument {name!r} of {job} cannot be told from a retry's. {error}"
            ) from None
    return (bound.args, bound.kwargs)


def _text(value: object, what: str) -> str:
    if not isinstance(value, _NAMING) or isinstance(value, bool):
        raise TypeError(
            f"{what} is made of {value!r} ({type(value).__name__}), which names no operation. "
            "Make it of texts, numbers, UUIDs or dates, for example of a primary key."
        )
    text = str(value.value if isinstance(value, Enum) else value)
    if not text:
        raise ValueError(
            f"{what} is made of an empty text, so that different operations would share it."
        )
    return text


class _Template(string.Formatter):
    """Fills in a template, and refuses values that name nothing."""

    def __init__(self, job: str) -> None:
        self._job = job

    def format_field(self, value: Any, format_spec: str) -> str:
        text = _text(value, f"The key of {self._job}")
        return format(value, format_spec) if format_spec else text
