"""What the fields of a policy can hold, and the errors for anything else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured

from . import keys

UNSAFE_METHODS: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})


def _whole(name: str, value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise _wrong(name, value, "a number of bytes, 0 or more")


# Now plus two of them must still be a date that every database can hold.
_LONGEST: Final = timedelta(days=365 * 1000)


def _duration(name: str, value: Any) -> Any:
    if isinstance(value, timedelta) and timedelta(0) <= value <= _LONGEST:
        return value
    raise _wrong(name, value, "a timedelta from 0 to 1000 years, such as timedelta(hours=24)")


def _ttl(name: str, value: Any) -> Any:
    if value is None or (isinstance(value, timedelta) and timedelta(0) < value <= _LONGEST):
        return value
    raise _wrong(name, value, "a timedelta above 0 up to 1000 years, or None to replay forever")


def _lease(name: str, value: Any) -> Any:
    if isinstance(value, timedelta) and timedelta(0) < value <= timedelta(days=1):
        return value
    raise _wrong(name, value, "a timedelta above 0 up to a day, such as timedelta(seconds=30)")


def _flag(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    raise _wrong(name, value, "True or False")


def _callable(name: str, value: Any) -> Any:
    if callable(value):
        return value
    raise _wrong(name, value, "a callable")


def _optional_callable(name: str, value: Any) -> Any:
    return value if value is None else _callable(name, value)


def _check(name: str, value: Any) -> Any:
    if value is None or (callable(value) and not _is_async(value)):
        return value
    raise _wrong(name, value, "None or a plain function, which refuses a replay by raising")


def _is_async(value: Any) -> bool:
    return iscoroutinefunction(value) or iscoroutinefunction(type(value).__call__)


def _text(name: str, value: Any) -> Any:
    if isinstance(value, str) and value:
        return value
    raise _wrong(name, value, "a text that is not empty")


def _optional_text(name: str, value: Any) -> Any:
    return value if value is None else _text(name, value)


def _format(name: str, value: Any) -> Any:
    names = sorted({"any", *keys.FORMAT_NAMES})
    expected = f"{', '.join(names)} or a regular expression"
    try:
        re.compile(_text(name, value))
    except (re.error, OverflowError, RecursionError) as error:
        raise _wrong(name, value, expected) from error
    if value not in names and value.lower() in names:
        raise _wrong(name, value, expected)  # as an expression, it would match only itself
    return value


def _one_of(*choices: str) -> Callable[[str, Any], Any]:
    def chosen(name: str, value: Any) -> Any:
        if isinstance(value, str) and value in choices:
            return value
        raise _wrong(name, value, " or ".join(map(repr, choices)))

    return chosen


def _set_of(kind: type, expected: str) -> Callable[[str, Any], Any]:
    def frozen(name: str, value: Any) -> Any:
        if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
            items = list(value)
            if all(isinstance(item, kind) for item in items):
                return frozenset(items)
        raise _wrong(name, value, expected)

    return frozen


_METHODS: Final = f"a set of methods: {', '.join(sorted(UNSAFE_METHODS))}"


def _methods(name: str, value: Any, expected: str = _METHODS) -> Any:
    methods = {method.upper() for method in _set_of(str, expected)(name, value)}
    if methods <= UNSAFE_METHODS:
        return frozenset(methods)
    raise _wrong(name, value, expected)


def _required(name: str, value: Any) -> Any:
    return value if isinstance(value, bool) else _methods(name, value, f"True, False or {_METHODS}")


def _statuses(name: str, value: Any) -> Any:
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


_CHECKS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "store": _text,
    "required": _required,
    "methods": _methods,
    "client_key": _flag,
    "key": _optional_callable,
    "key_format": _format,
    "scope": _callable,
    "principal": _optional_callable,
    "bind_principal": _flag,
    "hosts": _one_of("refuse", "separate", "same"),
    "operation": _optional_text,
    "fingerprint": _callable,
    "ttl": _ttl,
    "ttl_from": _one_of("creation", "last_use"),
    "retention": _duration,
    "mode": _one_of("auto", "transactional", "leased"),
    "lease": _lease,
    "on_interrupted": _one_of("resume", "hold"),
    "on_conflict": _one_of("reject", "wait", "accepted"),
    "wait_timeout": _duration,
    "retry_after": _duration,
    "on_store_error": _one_of("refuse", "execute"),
    "store_errors": _flag,
    "never_store": _set_of(int, "a set of status codes"),
    "stores": _optional_callable,
    "max_response_bytes": _whole,
    "store_body": _flag,
    "exclude_headers": _set_of(str, "a set of header names"),
    "replay_status": _statuses,
    "rebuild": _optional_callable,
    "check_replay": _check,
    "record_replays": _flag,
}


def validated(name: str, value: Any) -> Any:
    """The value of a policy's field, made immutable.

    Raises:
        ImproperlyConfigured: it is not what the field can hold.
    """
    return _CHECKS[name](name, value)
