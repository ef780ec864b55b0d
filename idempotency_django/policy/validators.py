"""What the fields of a policy can hold, and the errors for anything else.

A validator takes a field's name and value. It returns the value, made immutable, or raises
:exc:`~django.core.exceptions.ImproperlyConfigured`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured

from . import keys

Validator = Callable[[str, Any], Any]

UNSAFE_METHODS: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})


def byte_count(name: str, value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise _wrong(name, value, "a number of bytes, 0 or more")


# Now plus two of them must still be a date that every database can hold.
_LONGEST: Final = timedelta(days=365 * 1000)


def duration(name: str, value: Any) -> Any:
    if isinstance(value, timedelta) and timedelta(0) <= value <= _LONGEST:
        return value
    raise _wrong(name, value, "a timedelta from 0 to 1000 years, such as timedelta(hours=24)")


def ttl(name: str, value: Any) -> Any:
    if value is None or (isinstance(value, timedelta) and timedelta(0) < value <= _LONGEST):
        return value
    raise _wrong(name, value, "a timedelta above 0 up to 1000 years, or None to replay forever")


def lease(name: str, value: Any) -> Any:
    if isinstance(value, timedelta) and timedelta(0) < value <= timedelta(days=1):
        return value
    raise _wrong(name, value, "a timedelta above 0 up to a day, such as timedelta(seconds=30)")


def flag(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    raise _wrong(name, value, "True or False")


def function(name: str, value: Any) -> Any:
    if callable(value):
        return value
    raise _wrong(name, value, "a callable")


def optional_callable(name: str, value: Any) -> Any:
    return value if value is None else function(name, value)


def check_replay(name: str, value: Any) -> Any:
    if value is None or (callable(value) and not _is_async(value)):
        return value
    raise _wrong(name, value, "None or a plain function, which refuses a replay by raising")


def _is_async(value: Any) -> bool:
    return iscoroutinefunction(value) or iscoroutinefunction(type(value).__call__)


def text(name: str, value: Any) -> Any:
    if isinstance(value, str) and value:
        return value
    raise _wrong(name, value, "a text that is not empty")


def optional_text(name: str, value: Any) -> Any:
    return value if value is None else text(name, value)


def key_format(name: str, value: Any) -> Any:
    names = sorted({"any", *keys.FORMAT_NAMES})
    expected = f"{', '.join(names)} or a regular expression"
    try:
        re.compile(text(name, value))
    except (re.error, OverflowError, RecursionError) as error:
        raise _wrong(name, value, expected) from error
    if value not in names and value.lower() in names:
        raise _wrong(name, value, expected)  # as an expression, it would match only itself
    return value


def one_of(*choices: str) -> Validator:
    def chosen(name: str, value: Any) -> Any:
        if isinstance(value, str) and value in choices:
            return value
        raise _wrong(name, value, " or ".join(map(repr, choices)))

    return chosen


def set_of(kind: type, expected: str) -> Validator:
    def frozen(name: str, value: Any) -> Any:
        if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
            items = list(value)
            if all(isinstance(item, kind) for item in items):
                return frozenset(items)
        raise _wrong(name, value, expected)

    return frozen


_METHODS: Final = f"a set of methods: {', '.join(sorted(UNSAFE_METHODS))}"


def methods(name: str, value: Any, expected: str = _METHODS) -> Any:
    names = frozenset(method.upper() for method in set_of(str, expected)(name, value))
    if names <= UNSAFE_METHODS:
        return names
    raise _wrong(name, value, expected)


def required(name: str, value: Any) -> Any:
    return value if isinstance(value, bool) else methods(name, value, f"True, False or {_METHODS}")


def statuses(name: str, value: Any) -> Any:
    if isinstance(value, Mapping) and all(
        isinstance(status, int) and 100 <= status <= 599
        for pair in value.items()
        for status in pair
    ):
        return MappingProxyType(dict(value))
    raise _wrong(name, value, "a dict of status codes, such as {201: 200}")


def _wrong(name: str, value: Any, expected: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(
        f"An idempotency policy has {name}={value!r}; it must be {expected}."
    )
