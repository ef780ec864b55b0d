"""Plain data as bytes that are equal for equal data, in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from math import inf
from typing import Any, Final, NamedTuple
from uuid import UUID

LENGTH: Final = 12
"""Bytes of a content digest: 96 bits tell apart all requests that ever use one key."""

_SHORT: Final = 64
"""Bytes up to which a text is written out where the whole is longer than ``WRITTEN_OUT``."""

WRITTEN_OUT: Final = 1024 * 1024
"""Bytes up to which an object that occurs twice is written twice, as a copy of it would be."""


def digest(*parts: bytes | str) -> str:
    """SHA-256 hex of the parts; no two lists of parts collide."""
    return hashlib.sha256(framed(*parts)).hexdigest()


def content_digest(*parts: bytes | str) -> str:
    """The digest of what a request asks for: 24 hexadecimal characters, without a secret."""
    return hashlib.sha256(framed(*parts)).digest()[:LENGTH].hex()


def framed(*parts: bytes | str) -> bytes:
    """The parts, each after its length, so that no two lists of parts make the same bytes."""
    out = bytearray()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        out += b"%d:" % len(data)
        out += data
    return bytes(out)


def canonical(value: Any, *, at_most: float = WRITTEN_OUT) -> bytes:
    """Plain data as bytes that are equal for equal values and differ for all others.

    Each value follows its type and its length or count, so that no two values can be confused: 1,
    1.0, "1" and true are four values. The order of a mapping's keys and of a set does not matter.

    Args:
        value: JSON's types, bytes, ``Decimal``, ``UUID``, dates and times, enums, sets,
            dataclasses, Django models (by their label and primary key), pydantic models, and
            mappings, lists and tuples of these. A list, mapping or dataclass within itself, as YAML
            can say it, is written as its number.
        at_most: bytes up to which an object that occurs twice is written twice, as a copy of it
            would be. Beyond that, each list, mapping and long text is its digest, which is made
            once of an object that occurs twice: a few lines of YAML, whose aliases repeat lists of
            aliases, may stand for more data than there is memory.

    Raises:
        TypeError: it contains something else, whose text may differ in another process; or a set
            whose members contain it.
    """
    out: list[bytes] = []
    length = 0
    pending = [value]  # a stack: what a client sends may be nested deeper than Python's calls
    seen: dict[int, tuple[bytes, Any]] = {}  # what to write for an object that comes again, and it
    while pending:
        item = pending.pop()
        if type(item) is _End:
            _, itself = seen.pop(item.of)
            if at_most == inf:
                seen[item.of] = _shortened(out, item.start), itself
            continue
        if id(item) in seen:
            out.append(seen[id(item)][0])
            continue
        scalar: tuple[bytes, str] | None = None
        match item:
            case Mapping():
                written = b"m%d:" % len(item)
                names = sorted(item, key=_sort_key, reverse=True)
                parts = [part for name in names for part in (item[name], name)]
            case list() | tuple():
                written, parts = b"l%d:" % len(item), [*reversed(item)]
            case _:
                scalar = _scalar(item)
                if scalar is None:
                    label, *parts = _parts(item)
                kind, text = scalar or (b"o", label)
                data = text.encode("utf-8", "surrogatepass")
                written = b"%s%d:%s" % (kind, len(data), data)
        if scalar is None:
            seen[id(item)] = (b"r%d:" % len(seen), item)
            pending += (_End(id(item), len(out)), *parts)
        elif at_most == inf and len(written) > _SHORT:
            written = _short(written)
            seen[id(item)] = (written, item)
        out.append(written)
        if (length := length + len(written)) > at_most:
            return canonical(value, at_most=inf)
    return b"".join(out)


class _End(NamedTuple):
    """Where the items of a list or mapping end: what comes after is not within it.

    Attributes:
        of: the id of the list or mapping.
        start: where it begins in what is written.
    """

    of: int
    start: int


def _shortened(out: list[bytes], start: int) -> bytes:
    """What stands for all that was written from here on, of which only that is left."""
    out[start:] = [_short(b"".join(out[start:]))]
    return out[start]


def _short(written: bytes) -> bytes:
    """What stands for it where the whole is long."""
    return b"h" + hashlib.sha256(written).digest()


def _scalar(item: Any) -> tuple[bytes, str] | None:
    """The kind and the text of a value that has no parts; ``None`` for others."""
    match item:
        case str():
            return b"s", str.__str__(item)
        case bool() | None:
            return b"c", str(item)
        case int():
            return b"i", hex(item)  # str() refuses numbers of many digits
        case bytes() | bytearray():
            return b"b", item.hex()
        case float():
            return b"f", float.__repr__(item)
        case Decimal() | UUID() | timedelta():
            return b"o", f"{type(item).__name__} {item}"
        case date() | time():  # a datetime is a date
            return b"o", f"{type(item).__name__} {item.isoformat()}"
    return None


def _parts(item: Any) -> tuple[str, Any]:
    """The name of an object's type, and the plain data that it is made of."""
    kind = type(item)
    label = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(item, set | frozenset):
        return "set", _members(item)
    if isinstance(item, Enum):
        return label, item.name
    if is_dataclass(item) and not isinstance(item, type):
        return label, {field.name: getattr(item, field.name) for field in dataclass_fields(item)}
    if hasattr(kind, "model_fields") and hasattr(kind, "model_dump"):  # pydantic's
        return label, item.model_dump()
    meta = getattr(item, "_meta", None)
    if meta is not None and getattr(item, "pk", None) is not None:
        return str(meta.concrete_model._meta.label_lower), item.pk
    raise TypeError(_no_plain_data(item, is_model=meta is not None))


def _members(items: frozenset[Any] | set[Any]) -> list[bytes]:
    try:
        return sorted(map(canonical, items))
    except RecursionError:
        raise TypeError(
            "A set cannot be compared with a retry's: what is in it contains the set itself, or "
            "sets are nested too deep. Pass a list, or what tells its members apart."
        ) from None


def _no_plain_data(item: Any, *, is_model: bool) -> str:
    named = f"{type(item).__module__}.{type(item).__qualname__}"
    if is_model:
        return (
            f"{named} cannot be compared with a retry's: it is not saved and has no primary key. "
            "Save it first."
        )
    return (
        f"{named} cannot be compared with a retry's: its text may differ in the next process. "
        "Pass plain data instead: texts, numbers, dates, lists, dicts, dataclasses, or saved "
        "models."
    )


def _sort_key(name: Any) -> tuple[str, str]:
    return type(name).__name__, str(name)
