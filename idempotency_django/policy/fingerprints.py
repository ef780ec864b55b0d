"""Fingerprints: what a request asks for, as bytes that are equal only for a retry.

A fingerprint callable takes an :class:`~idempotency_django.policy.invocation.Invocation` and
returns bytes or text.
The policy hashes the result together with the caller's principal. The default is
:func:`whole_request`. :func:`fields` uses only some fields of the body, and :func:`without_body`
uses none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Final
from urllib.parse import parse_qsl
from uuid import UUID

from .invocation import Body, Form, Hashed, Invocation, Parsed

FingerprintFunction = Callable[[Invocation], bytes | str]


def whole_request(invocation: Invocation) -> bytes:
    """The whole request: method, full path, query, media type and body.

    The order of query parameters and of JSON keys, JSON spacing and a form's boundary make no
    difference. Anything else does (draft-ietf-httpapi-idempotency-key-header-07, section 2.4).
    """
    body = invocation.body
    if isinstance(body, Parsed) and isinstance(body.raw, bytes) and _is_json(invocation.media_type):
        body = body.raw  # which shows more: 1.0 and 1.00, a name that appears twice
    return _request(
        invocation, _canonical(_decoded(body, invocation.media_type), invocation.media_type)
    )


def without_body(invocation: Invocation) -> bytes:
    """Everything except the body, which is not read: for uploads that only the view should read.

    Then only the key tells two bodies apart, unless the client sends their digest in
    ``Content-Digest`` (RFC 9530), which is part of the fingerprint. Verify the digest in the view.
    """
    headers = getattr(invocation.request, "headers", {})
    return _request(invocation, b"unread" + headers.get("Content-Digest", "").encode())


def fields(*, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> FingerprintFunction:
    """Make a fingerprint of the request that uses only some fields of its body.

    Args:
        include: the fields that matter; empty: all. ``"card.number"`` is a nested JSON field.
        exclude: the fields that do not matter, for example a client's timestamp.

    A body without fields (not an object and not a form) counts as a whole.
    """
    included, excluded = _names("include", include), _names("exclude", exclude)
    include_tree, exclude_tree = _tree(included), _tree(excluded)

    def kept(name: str) -> bool:
        return (not included or name in included) and name not in excluded

    def of_some_fields(invocation: Invocation) -> bytes:
        body = _decoded(invocation.body, invocation.media_type)
        if isinstance(body, Form):
            named = {name: values for name, values in body.fields.items() if kept(name)}
            body = Form(named, tuple(file for file in body.files if kept(file.field)))
        elif isinstance(body, Parsed) and isinstance(body.value, Mapping):
            body = Parsed(_choose(body.value, include_tree, exclude_tree))
        return _request(invocation, _canonical(body, invocation.media_type))

    return of_some_fields


def field_value(invocation: Invocation, path: str) -> Any:
    """The value of one field of the body (``"card.number"``), or ``None`` if it is absent."""
    body = invocation.body
    if isinstance(body, Form):
        values = body.fields.get(path)
        return values[-1] if values else None
    value = body.value if isinstance(body, Parsed) else _loaded(body, invocation.media_type)
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def _loaded(body: bytes | Hashed, media_type: str) -> Any:
    """What a view would make of a JSON body, but for numbers with a fraction."""
    if isinstance(body, Hashed) or not _is_json(media_type):
        return None
    try:
        return _loads(body)
    except (ValueError, RecursionError):
        return None


def digest(*parts: bytes | str) -> str:
    """SHA-256 hex of the parts; no two lists of parts collide."""
    return hashlib.sha256(framed(*parts)).hexdigest()


def framed(*parts: bytes | str) -> bytes:
    """The parts, each after its length, so that no two lists of parts make the same bytes."""
    out = bytearray()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        out += b"%d:" % len(data)
        out += data
    return bytes(out)


def canonical(value: Any) -> bytes:
    """Plain data as bytes that are equal for equal values and differ for all others.

    Each value follows its type and its length or count, so that no two values can be confused: 1,
    1.0, "1" and true are four values. The order of a mapping's keys and of a set does not matter.

    Args:
        value: JSON's types, bytes, ``Decimal``, ``UUID``, dates and times, enums, sets,
            dataclasses, Django models (by their label and primary key), pydantic models, and
            mappings, lists and tuples of these.

    Raises:
        TypeError: it contains something else, whose text may differ in another process.
    """
    # A stack of its own, because what a client sends may be nested deeper than Python's calls; and
    # a second sight of the same object is its number, because YAML's may hold themselves.
    out: list[bytes] = []
    pending = [value]
    seen: dict[int, tuple[int, Any]] = {}  # with the object itself, or its id could be used again
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping | list | tuple):
            if id(item) in seen:
                out.append(b"r%d:" % seen[id(item)][0])
                continue
            seen[id(item)] = (len(seen), item)
        match item:
            case Mapping():
                out.append(b"m%d:" % len(item))
                for name in sorted(item, key=_sort_key, reverse=True):
                    pending += (item[name], name)
            case list() | tuple():
                out.append(b"l%d:" % len(item))
                pending += reversed(item)
            case _:
                scalar = _scalar(item)
                if scalar is None:
                    label, parts = _parts(item)
                    pending.append(parts)
                    scalar = (b"o", label)
                kind, text = scalar
                data = text.encode("utf-8", "surrogatepass")
                out.append(b"%s%d:%s" % (kind, len(data), data))
    return b"".join(out)


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
        return "set", sorted(map(canonical, item))
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


def _request(invocation: Invocation, body: bytes) -> bytes:
    # The order of a parameter's own values matters, that of different ones does not.
    pairs = sorted(_query(invocation.query), key=itemgetter(0))
    query = framed(*(part for pair in pairs for part in pair))
    return framed(invocation.method, invocation.path, query, invocation.media_type, body)


def _query(query: str) -> list[tuple[str, str]]:
    if not query:
        return []
    return parse_qsl(query, keep_blank_values=True, errors="surrogateescape")


def _decoded(body: Body, media_type: str) -> Body:
    """JSON bytes as plain Python; everything else, JSON that does not parse included, as it is."""
    if not isinstance(body, bytes) or not _is_json(media_type):
        return body
    try:
        return Parsed(_loads(body, object_pairs_hook=_unique))
    except (ValueError, RecursionError):
        return body


_NAN: Final = float("nan")


def _number(text: str) -> tuple[float, str]:
    """A JSON number with a fraction, letter by letter: 1.0 is not 1.00, and nothing is rounded.

    No list that a client sends can be equal to it, because a client's NaN is converted here too. An
    object would be many times slower to encode.
    """
    return _NAN, text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("A name appears twice, and parsers differ in which of the two they take.")
    return made


_loads = partial(json.loads, parse_float=_number, parse_constant=_number)


def _is_json(media_type: str) -> bool:
    return media_type == "application/json" or media_type.endswith("+json")


def _canonical(body: Body, media_type: str) -> bytes:
    if isinstance(body, bytes):
        return b"raw" + hashlib.sha256(body).digest()
    if isinstance(body, Hashed):
        return b"raw" + bytes.fromhex(body.sha256)
    if isinstance(body, Form):
        named = {name: list(values) for name, values in body.fields.items()}
        uploaded = [
            (file.field, file.name, file.media_type, file.size, file.sha256)
            for file in sorted(body.files, key=attrgetter("field"))
        ]
        return b"form" + canonical((named, uploaded))
    if _is_json(media_type):
        try:
            return b"json" + _plain_json(body.value)
        except (TypeError, ValueError, RecursionError):
            pass  # not what JSON can say, or too deep to say it
    try:
        return b"parsed" + canonical(body.value)
    except TypeError:  # a parser of your own has made an object that is not plain
        if body.raw is None:
            raise
        return _canonical(body.raw, media_type)


def _plain_json(value: Any) -> bytes:
    """The result of a JSON parser as JSON again: several times faster than :func:`canonical`."""
    return _encode(value).encode()


def _as_dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_as_dict).encode


def _names(argument: str, names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"fingerprints.fields({argument}={names!r}) needs a list: [{names!r}].")
    return frozenset(names)


_Tree = dict[str, "_Tree | None"]


def _tree(names: Iterable[str]) -> _Tree:
    """``["a.b", "c"]`` as ``{"a": {"b": None}, "c": None}``; None stands for the whole field."""
    tree: _Tree = {}
    for name in sorted(names):  # a whole field stands before its parts
        branch: _Tree | None = tree
        *above, last = name.split(".")
        for part in above:
            branch = branch.setdefault(part, {}) if branch is not None else None
        if branch is not None:
            branch[last] = None
    return tree


def _choose(value: Mapping[Any, Any], include: _Tree, exclude: _Tree) -> dict[Any, Any]:
    chosen: dict[Any, Any] = {}
    for name, item in value.items():
        wanted, unwanted = include.get(name, {}), exclude.get(name, {})
        if (include and name not in include) or (name in exclude and unwanted is None):
            continue
        nested = isinstance(item, Mapping) and (wanted or unwanted)
        chosen[name] = _choose(item, wanted or {}, unwanted or {}) if nested else item
    return chosen
