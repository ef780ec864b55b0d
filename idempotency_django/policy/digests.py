"""Plain data as bytes that are equal for equal data, in every process."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from typing import Any
from uuid import UUID

from django.conf import settings
from django.utils.crypto import salted_hmac


def digest(*parts: bytes | str) -> str:
    """SHA-256 hex of the parts; no two lists of parts collide."""
    return hashlib.sha256(framed(*parts)).hexdigest()


def keyed_digests(purpose: str, *parts: bytes | str) -> tuple[str, ...]:
    """HMAC-SHA-256 hex of the parts, against which no guess can be tested without the secret.

    Args:
        purpose: what the digest is for; digests for different purposes have nothing in common.
        parts: as for :func:`digest`.

    Returns:
        The digest under ``SECRET_KEY``, and after it those under ``SECRET_KEY_FALLBACKS``.
    """
    data = framed(*parts)
    secrets = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    return tuple([hmac.digest(_key(purpose, secret), data, "sha256").hex() for secret in secrets])


@lru_cache(maxsize=64)
def _key(purpose: str, secret: str | bytes) -> bytes:
    return salted_hmac(f"idempotency_django.{purpose}", "", secret, algorithm="sha256").digest()


def framed(*parts: bytes | str) -> bytes:
    """The parts, each after its length, so that no two lists of parts make the same bytes."""
    out = bytearray()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        out += b"%d:" % len(data)
        out += data
    return bytes(out)


def canonical(value: Any) -> bytes:
    """Plain data as bytes, equal for values that are written the same and different for all others.

    Each value follows its type and its length or count, so that no two values can be confused: 1,
    1.0, "1" and true are four values. The order of a mapping's keys and of a set does not matter.

    Args:
        value: JSON's types, bytes, ``Decimal``, ``UUID``, dates and times, enums, sets,
            dataclasses, Django models (by their label and primary key), pydantic models, and
            mappings, lists and tuples of these.

    Raises:
        TypeError: it contains something else, whose text may differ in another process; or itself.
    """
    try:
        return _written(value)
    except RecursionError:
        raise TypeError(
            "A value cannot be compared with a retry's, because it contains itself or is nested "
            "too deep. Pass a flatter one, or its digest."
        ) from None


def _written(item: Any) -> bytes:
    scalar = _scalar(item)
    if scalar is not None:
        return _labelled(*scalar)
    head, parts = _opened(item)
    return head + b"".join(map(_written, parts))


def _labelled(kind: bytes, text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"%s%d:%s" % (kind, len(data), data)


def _opened(item: Any) -> tuple[bytes, Iterator[Any]]:
    """The prefix of a compound value, and its parts."""
    match item:
        case Mapping():
            names = sorted(item, key=lambda name: (type(name).__name__, str(name)))
            return b"m%d:" % len(item), (part for name in names for part in (name, item[name]))
        case list() | tuple():
            return b"l%d:" % len(item), iter(item)
    label, *parts = _parts(item)
    return _labelled(b"o", label), iter(parts)


def _scalar(item: Any) -> tuple[bytes, str] | None:
    """The kind and the text of a value that has no parts, or ``None`` for any other value."""
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
        return "set", sorted(map(_written, item))
    if isinstance(item, Enum):
        return label, item.name
    if is_dataclass(item) and not isinstance(item, type):
        return label, {field.name: getattr(item, field.name) for field in dataclass_fields(item)}
    if hasattr(kind, "model_fields") and hasattr(kind, "model_dump"):  # pydantic's
        return label, item.model_dump()
    meta = getattr(item, "_meta", None)
    if meta is None:
        raise TypeError(
            f"{label} cannot be compared with a retry's, because its text can differ in the next "
            "process. Pass plain data: strings, numbers, dates, lists, dicts, dataclasses, or "
            "saved models."
        )
    if getattr(item, "pk", None) is None:
        raise TypeError(
            f"{label} cannot be compared with a retry's, because it has no primary key. Save it "
            "first."
        )
    return str(meta.concrete_model._meta.label_lower), item.pk
