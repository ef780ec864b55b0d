"""Results that are no plain JSON: dataclasses and models of pydantic, stored and rebuilt.

Their type says how to rebuild them. Pydantic is known by its methods, and never imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from ..errors import ResponseNotStored

_FROM_TEXT: Final[dict[Any, Any]] = {
    Decimal: Decimal,
    UUID: UUID,
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
}


def type_of_result(function: Any) -> Any:
    """The type to rebuild a function's results as, from its annotation; ``None``: they are JSON.

    Only an annotation that contains a dataclass or a model of pydantic counts. That of a decorated
    function says what the function returns, and not what the decorator makes of it.
    """
    try:
        annotation = getattr(function, "__annotations__", {}).get("return")
    except NameError:  # annotations that are read lazily
        return None
    if annotation is None or hasattr(function, "__wrapped__"):
        return None
    if isinstance(annotation, str):
        annotation = _named(annotation, function.__module__)
    return annotation if _has_object(annotation) else None


@lru_cache(maxsize=256)
def _named(annotation: str, module: str) -> Any:
    """The type that an annotation names in its module; ``None``: it names none at runtime."""
    # Alone: the type of another argument may be imported for type checkers only.
    holder = SimpleNamespace(__annotations__={"return": annotation})
    try:
        return get_type_hints(holder, vars(sys.modules[module]))["return"]
    except Exception:  # noqa: BLE001  # any text can be an annotation
        return None


def dump_result(name: str, kind: Any, value: Any) -> tuple[str, Any]:
    """The result of the function ``name`` as JSON, and as :func:`load_result` rebuilds it.

    Raises:
        TypeError: what would be rebuilt differs from the value.
    """
    try:
        text = _encode(value)
        rebuilt = _loaded(kind, json.loads(text))
    except Exception as error:
        raise _lossy(name, kind, f"{type(error).__name__}: {error}") from error
    if difference := _difference(value, rebuilt, "it"):
        raise _lossy(name, kind, difference)
    return text, rebuilt


def load_result(name: str, kind: Any, stored: Any) -> Any:
    """The result of the function ``name``, from JSON's types.

    Raises:
        ResponseNotStored: the type has changed since, and the stored result does not fit it.
    """
    try:
        return _loaded(kind, stored)
    except Exception as error:
        raise ResponseNotStored(
            f"{name!r} was executed and is not executed again. Its stored result does not fit "
            f"{_shown(kind)}, which has probably changed since. Give new fields a default, and "
            "keep the names of others."
        ) from error


def _lossy(name: str, kind: Any, why: str) -> TypeError:
    return TypeError(
        f"The result of {name!r} cannot be stored and rebuilt as {_shown(kind)}: {why}. Return an "
        "object of this type whose fields are annotated with JSON's types, Decimal, UUID, date, "
        "datetime, time, enums, dataclasses, models of pydantic, and lists, tuples and dicts of "
        "these."
    )


def _shown(kind: Any) -> str:
    return kind.__qualname__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def _is_model(kind: Any) -> bool:
    return hasattr(kind, "model_validate_json") and hasattr(kind, "model_dump")


def _is_object(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or _is_model(kind))


def _has_object(kind: Any) -> bool:
    return _is_object(get_origin(kind) or kind) or any(map(_has_object, get_args(kind)))


def _plain(value: Any) -> Any:
    """What stands for a value that is not JSON."""
    if _is_model(type(value)):
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if type(value) in _FROM_TEXT:
        return str(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


_encode: Final = json.JSONEncoder(allow_nan=False, default=_plain).encode


def _loaded(kind: Any, stored: Any) -> Any:
    """A value of the type. What the type does not say is left as JSON has it."""
    origin, inner = get_origin(kind), get_args(kind)
    if stored is None:
        return None
    if origin is Annotated:
        return _loaded(inner[0], stored)
    if origin in (Union, UnionType):
        kinds = [each for each in inner if each is not NoneType]
        return _loaded(kinds[0], stored) if len(kinds) == 1 else stored
    if inner and origin is list:
        return [_loaded(inner[0], each) for each in stored]
    if inner and origin is tuple:
        kinds = [inner[0]] * len(stored) if inner[-1] is ... else list(inner)
        return tuple(_loaded(*each) for each in zip(kinds, stored, strict=True))
    if inner and origin is dict:
        return {name: _loaded(inner[1], each) for name, each in stored.items()}
    return _made(origin or kind, stored)


def _made(kind: Any, stored: Any) -> Any:
    if kind in _FROM_TEXT:
        return _FROM_TEXT[kind](stored)
    if _is_model(kind):
        return kind.model_validate_json(json.dumps(stored))  # a strict model takes texts in JSON
    if isinstance(kind, type) and is_dataclass(kind):
        given = {name: _loaded(each, stored[name]) for name, each in _init(kind) if name in stored}
        return kind(**given)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(stored)
    return stored


@lru_cache(maxsize=256)
def _init(kind: Any) -> tuple[tuple[str, Any], ...]:
    """The arguments of a dataclass, and their types."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple((field.name, hints[field.name]) for field in fields(kind) if field.init)


def _difference(one: Any, other: Any, place: str) -> str:
    """The first place where two values differ, or their types do; empty: nowhere."""
    if type(one) is not type(other):
        return f"{place} is a {type(one).__name__}, and a retry would get a {type(other).__name__}"
    pairs: Iterable[tuple[str, Any, Any]]
    if isinstance(one, list | tuple) and len(one) == len(other):
        pairs = ((f"{place}[{at}]", *both) for at, both in enumerate(zip(one, other, strict=True)))
    elif isinstance(one, dict) and one.keys() == other.keys():
        pairs = ((f"{place}[{name!r}]", each, other[name]) for name, each in one.items())
    elif is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in fields(one)]
        pairs = ((f"{place}.{name}", getattr(one, name), getattr(other, name)) for name in names)
    else:
        return "" if one == other else f"{place} would not be equal for a retry"
    return next(filter(None, (_difference(a, b, where) for where, a, b in pairs)), "")
