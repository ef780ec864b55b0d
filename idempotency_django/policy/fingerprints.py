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
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Final
from urllib.parse import parse_qsl

from .digests import canonical, framed
from .invocation import Body, Form, Invocation, Parsed, Unread

_POSITION: Final = re.compile("[0-9]{1,9}")

FingerprintFunction = Callable[[Invocation], bytes | str]


def whole_request(invocation: Invocation) -> bytes:
    """The whole request: method, full path, query, media type and body.

    The order of query parameters and of JSON keys, JSON spacing and a form's boundary make no
    difference. Anything else does (draft-ietf-httpapi-idempotency-key-header-07, section 2.4).
    """
    body = _decoded(invocation.body, invocation.media_type)
    return _request(invocation, body)


def without_body(invocation: Invocation) -> bytes:
    """Everything except the body, which is not read: for uploads that only the view should read.

    Then only the key tells two bodies apart, unless the client sends their digest in
    ``Content-Digest`` (RFC 9530), which is part of the fingerprint. Verify the digest in the view.
    """
    headers = getattr(invocation.request, "headers", {})
    body = Unread(headers.get("Content-Digest", ""))
    return _request(invocation, body)


def fields(*, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> FingerprintFunction:
    """Make a fingerprint of the request that uses only some fields of its body.

    Args:
        include: the fields that matter, by default all. ``"card.number"`` is a nested JSON field.
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
        return _request(invocation, body)

    return of_some_fields


def field_value(invocation: Invocation, path: str) -> Any:
    """The value of one field of the body (``"card.number"``), or ``None`` if it is absent.

    A number is a position in a list: ``"items.0.id"``.
    """
    body = invocation.body
    if isinstance(body, Form):
        values = body.fields.get(path)
        return values[-1] if values else None
    value = body.value if isinstance(body, Parsed) else _loaded(body, invocation.media_type)
    for name in path.split("."):
        if isinstance(value, list) and _POSITION.fullmatch(name):
            value = value[int(name)] if int(name) < len(value) else None
        elif isinstance(value, Mapping):
            value = value.get(name)
        else:
            return None
    return value


def _loaded(body: bytes | Unread, media_type: str) -> Any:
    """The decoded JSON body as a view sees it, except for numbers with a fraction."""
    if isinstance(body, Unread) or not is_json(media_type):
        return None
    try:
        return _loads(body)
    except (ValueError, RecursionError):
        return None


def _request(invocation: Invocation, body: Body) -> bytes:
    try:
        content = _canonical(body)
    except RecursionError:  # JSON that is nested too deep to be written again
        content = _canonical(invocation.body)
    # The order of a parameter's own values matters, that of different ones does not.
    query = b""
    if invocation.query:
        pairs = parse_qsl(invocation.query, keep_blank_values=True, errors="surrogateescape")
        pairs.sort(key=itemgetter(0))
        query = framed(*chain.from_iterable(pairs))
    return framed(invocation.method, invocation.path, query, invocation.media_type, content)


def _decoded(body: Body, media_type: str) -> Body:
    """JSON bytes as plain Python; everything else, JSON that does not parse included, as it is."""
    if not isinstance(body, bytes) or not is_json(media_type):
        return body
    try:
        return Parsed(_loads(body, object_pairs_hook=unique_members))
    except (ValueError, RecursionError):
        return body


_NAN: Final = float("nan")


def _number(text: str) -> tuple[float, str]:
    """A JSON number with a fraction, letter by letter: 1.0 is not 1.00, and nothing is rounded.

    No list that a client sends can be equal to it, because a client's NaN is converted here too. An
    object would be many times slower to encode.
    """
    return _NAN, text


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The members of a JSON object, for ``object_pairs_hook``.

    Raises:
        ValueError: a name appears twice.
    """
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name appears twice, and parsers differ in which value they use")
    return members


_loads = partial(json.loads, parse_float=_number, parse_constant=_number)


def media_type_of(content_type: str) -> str:
    """The media type of a ``Content-Type``, in lower case and without its parameters."""
    return content_type.partition(";")[0].strip().lower()


@lru_cache(maxsize=64)
def is_json(media_type: str) -> bool:
    """Whether a media type in lower case is JSON's."""
    return media_type == "application/json" or media_type.endswith("+json")


def _canonical(body: Body) -> bytes:
    if isinstance(body, bytes):
        return b"raw" + hashlib.sha256(body).digest()
    if isinstance(body, Unread):
        return b"unread" + body.content_digest.encode()
    if isinstance(body, Form):
        named = {name: list(values) for name, values in body.fields.items()}
        uploaded = [
            (file.field, file.name, file.media_type, file.size, file.sha256)
            for file in sorted(body.files, key=attrgetter("field"))
        ]
        return b"form" + canonical((named, uploaded))
    try:
        # As JSON again, which is several times faster than canonical().
        return b"json" + _encode(body.value).encode()
    except (TypeError, ValueError):  # an object that a parser makes, or a number of many digits
        return b"parsed" + canonical(body.value)


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


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
