"""What a request asks for, as bytes that are equal for a retry and differ for anything else.

A fingerprint callable takes a :class:`~idempotency_django.records.Call` and returns bytes or text;
the policy hashes it together with the caller's principal. :func:`whole_request` is the default;
:func:`fields` looks at some fields of the body only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import parse_qsl

from .records import Body, Call, Form, Parsed

FingerprintFunction = Callable[[Call], bytes | str]


def whole_request(call: Call) -> bytes:
    """Everything that is asked for: method, full path, query, media type and body.

    The order of query parameters and of JSON keys, JSON spacing and a form's boundary make no
    difference; anything else does (draft-ietf-httpapi-idempotency-key-header-07, section 2.4).
    """
    return _request(call, _canonical(_decoded(call.body, call.media_type)))


def fields(*, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> FingerprintFunction:
    """Make a fingerprint of the request that looks at some fields of its body only.

    Args:
        include: the fields that matter; all when empty. ``"card.number"`` is a nested JSON field.
        exclude: the fields that do not matter, a client's timestamp for example.

    A body without fields (not an object and not a form) counts as a whole.
    """
    included, excluded = _paths(include), _paths(exclude)

    def of_some_fields(call: Call) -> bytes:
        body = _decoded(call.body, call.media_type)
        if isinstance(body, Form):
            named = {name: list(values) for name, values in body.fields.items()}
            files = [file for file in body.files if _kept(file.field, include, exclude)]
            chosen: Body = Form(_choose(named, included, excluded), tuple(files))
        elif isinstance(body, Parsed) and isinstance(body.value, Mapping):
            chosen = Parsed(_choose(body.value, included, excluded))
        else:
            chosen = body
        return _request(call, _canonical(chosen))

    include, exclude = frozenset(include), frozenset(exclude)
    return of_some_fields


def field_value(call: Call, path: str) -> Any:
    """The value of one field of the body (``"card.number"``), or ``None`` where it is absent."""
    body = _decoded(call.body, call.media_type)
    if isinstance(body, Form):
        values = body.fields.get(path)
        return values[-1] if values else None
    value = body.value if isinstance(body, Parsed) else None
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def digest(*parts: bytes | str) -> str:
    """SHA-256 hex of the parts, each behind its length, so that no two lists of parts collide."""
    return hashlib.sha256(_framed(*parts)).hexdigest()


def _framed(*parts: bytes | str) -> bytes:
    framed = bytearray()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        framed += b"%d:" % len(data)
        framed += data
    return bytes(framed)


def _request(call: Call, body: bytes) -> bytes:
    query = [part for pair in sorted(_query(call.query)) for part in pair]
    return _framed(call.method, call.path, _framed(*query), call.media_type, body)


def _query(query: str) -> list[tuple[str, str]]:
    return parse_qsl(query, keep_blank_values=True, errors="surrogateescape")


def _decoded(body: Body, media_type: str) -> Body:
    """JSON bytes as plain Python; everything else, JSON that does not parse included, as it is."""
    if not isinstance(body, bytes) or not _is_json(media_type):
        return body
    try:
        return Parsed(json.loads(body, parse_float=Decimal))
    except (ValueError, RecursionError):
        return body


def _is_json(media_type: str) -> bool:
    return media_type == "application/json" or media_type.endswith("+json")


def _canonical(body: Body) -> bytes:
    match body:
        case bytes():
            return b"raw" + body
        case Form(form_fields, files):
            named = [_framed(name, *values) for name, values in sorted(form_fields.items())]
            uploaded = sorted(
                _framed(file.field, file.name, file.media_type, str(file.size), file.sha256)
                for file in files
            )
            return b"form" + _framed(_framed(*named), _framed(*uploaded))
        case Parsed(value):
            return b"json" + _canonical_json(value)


def _canonical_json(value: Any) -> bytes:
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_unusual)
    except (TypeError, ValueError, RecursionError):
        # Keys of mixed types or a depth that json cannot walk: a retry still repeats itself.
        text = repr(value)
    return text.encode()


def _unusual(value: Any) -> Any:
    """A value that JSON has no name for, tagged so that it never equals one that JSON has."""
    if isinstance(value, Mapping):
        return dict(value)
    return {f"\0{type(value).__name__}": str(value)}


_Tree = dict[str, "_Tree"]


def _paths(names: Iterable[str]) -> _Tree:
    """``["a.b", "a.c", "d"]`` as ``{"a": {"b": {}, "c": {}}, "d": {}}``."""
    tree: _Tree = {}
    for name in names:
        branch = tree
        for part in name.split("."):
            branch = branch.setdefault(part, {})
    return tree


def _choose(value: Mapping[str, Any], include: _Tree, exclude: _Tree) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for name, item in value.items():
        wanted, unwanted = include.get(name), exclude.get(name)
        if (include and wanted is None) or unwanted == {}:
            continue
        nested = isinstance(item, Mapping) and (wanted or unwanted)
        chosen[name] = _choose(item, wanted or {}, unwanted or {}) if nested else item
    return chosen


def _kept(name: str, include: Iterable[str], exclude: Iterable[str]) -> bool:
    return (not include or name in include) and name not in exclude


def values(call: Call, paths: Sequence[str]) -> list[str]:
    """The named fields of the body as canonical text, for keys that are made of them."""
    return [_canonical_json(field_value(call, path)).decode() for path in paths]
