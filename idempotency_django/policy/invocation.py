"""The invocation: an adapter's description of one request or call, for the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedFile:
    """The identity of an uploaded file: its field, name, media type, size and SHA-256 (hex)."""

    field: str
    name: str
    media_type: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Form:
    """A body that arrived as a form: the values of each field in order, and the files."""

    fields: Mapping[str, Sequence[str]]
    files: tuple[UploadedFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Unread:
    """A body that is not read, because it is too large: what the client says of it, if anything.

    Attributes:
        content_digest: the value of the header ``Content-Digest`` (RFC 9530).
    """

    content_digest: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A body of JSON as plain Python."""

    value: Any


Body = bytes | Form | Unread | Parsed
"""The client's request, in the adapter's representation."""


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """An adapter's description of one request, for the policy.

    Attributes:
        name: the operation (``"POST /api/charges/"``): the method and the route, which stay the
            same when code moves.
        principal: who is calling (``"user:42"``); empty for unauthenticated callers.
        authorization: digest of the ``Authorization`` header, if the principal is not known; empty
            if there is none.
        host: the request's host, in lower case and without its port; empty outside HTTP.
        method: the HTTP method in capitals.
        path: the whole path, without the query.
        query: the query string as it was sent.
        media_type: of the body, lower case, without parameters.
        read: reads the body.
        request: the framework's own object, for your callables that need more.
    """

    name: str
    principal: str
    method: str
    path: str
    authorization: str = ""
    host: str = ""
    query: str = ""
    media_type: str = ""
    read: Callable[[], Body] = bytes
    request: Any = None

    @cached_property
    def body(self) -> Body:
        """The body of the request. It is read at its first use."""
        return self.read()

    def changed(self, **changes: Any) -> Invocation:
        """The same call with other attributes."""
        return replace(self, **{"read": lambda: self.body, **changes})
