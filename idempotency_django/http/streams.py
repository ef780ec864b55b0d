"""The stream of a request's body: read, and given back as if nobody had read it."""

from __future__ import annotations

import hashlib
import os
from tempfile import SpooledTemporaryFile
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, UnreadablePostError

from ..logs import escaped
from ..policy.invocation import Hashed

CHUNK: Final = 64 * 1024
"""Bytes that are read at once."""


LONGEST: Final = 1024**3
"""Bytes of a body that is read for its fingerprint: what is longer would fill the disk."""


def rewind(request: Any, stream: Any) -> None:
    """Give the stream back to the request, at its beginning."""
    # Django has no public way to do so: these names are those that REST framework relies on, too.
    stream.seek(0)
    request._stream = stream
    request._read_started = False
    if "wsgi.input" in request.META:  # where some views stream from
        request.META["wsgi.input"] = stream


def rewindable(request: Any) -> Any:
    """The request's stream, at its beginning, such that it can be read again."""
    stream = request._stream
    if not is_seekable(stream):
        if (announced(request) or 0) > LONGEST:
            raise _too_long()
        stream = spooled(request)
    rewind(request, stream)
    return stream


def spooled(source: Any) -> Any:
    """What is left of a stream, in memory or in a temporary file."""
    spool = _Spool(settings.FILE_UPLOAD_MAX_MEMORY_SIZE, dir=settings.FILE_UPLOAD_TEMP_DIR)
    while chunk := source.read(CHUNK):
        if spool.tell() + len(chunk) > LONGEST:
            raise _too_long()
        spool.write(chunk)
    spool.seek(0)
    return spool


def _too_long() -> RequestDataTooBig:
    return RequestDataTooBig(
        f"A body of more than {LONGEST} bytes is not read to compare it with a retry's. Give the "
        "view's idempotency policy fingerprint=fingerprints.without_body to take longer ones."
    )


def raw_body_of(request: Any, *, in_memory: bool = False) -> bytes | Hashed:
    """The bytes of a readable body, or their digest where they are too many to hold in memory.

    Args:
        request: the request.
        in_memory: whether no view could have more of it in memory than Django allows.

    Raises:
        RequestDataTooBig: it announces more than that, and is ``in_memory``.
        UnreadablePostError: its end is missing.
    """
    length = announced(request)  # without, Django's own body is an error
    fits = hasattr(request, "_body")
    if not fits:
        stream, limit = request._stream, settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        if in_memory and limit is not None and (length or 0) > limit:
            return request.body  # type: ignore[no-any-return]  # which refuses it, as in the view
        size = length or 0
        if is_seekable(stream):
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
        fits = length is not None and (limit is None or size <= limit)
    if not fits:
        digest = hashed(rewindable(request))
        refuse_half(request, digest.size)
        return digest
    body: bytes = request.body
    if len(body) < (length or 0):
        refuse_half(request, len(body))
    rewind(request, request._stream)
    return body


def announced(request: HttpRequest) -> int | None:
    """The length that was sent, 0 where none was; ``None``: it is no number."""
    try:
        return int(request.META.get("CONTENT_LENGTH") or 0)
    except ValueError:
        return None


def refuse_half(request: HttpRequest, received: int) -> None:
    """Refuse a body whose end is missing, which some servers hand on when a client breaks off."""
    length = announced(request) or 0
    if received < length:
        raise UnreadablePostError(
            f"Only {received} of the {length} bytes that {request.method} "
            f"{escaped(request.path)} announced have arrived, so nothing was executed. The client "
            "has closed the connection."
        )


def is_seekable(stream: Any) -> bool:
    """Whether a stream can be read again."""
    return bool(getattr(stream, "seekable", lambda: False)())


class _Spool(SpooledTemporaryFile[bytes]):
    """Is closed with its request, which Python would warn of."""

    def __del__(self) -> None:
        self.close()


def hashed(stream: Any) -> Hashed:
    """The digest of a stream, which is at its beginning afterwards."""
    sha256 = hashlib.sha256()
    while chunk := stream.read(CHUNK):
        sha256.update(chunk)
    size = stream.tell()
    stream.seek(0)
    return Hashed(size=size, sha256=sha256.hexdigest())


def stream_of(request: Any) -> Any:
    """The stream of a request whose body may have been read; it can be read again."""
    if hasattr(request, "_body"):
        return request._stream
    return rewindable(request)
