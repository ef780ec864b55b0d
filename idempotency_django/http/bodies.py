"""The body of a request: it is read for the fingerprint, and the view can still read all of it.

The view finds the request unread: it may parse the form, set upload handlers,
take ``request.body`` or stream. What is too large for memory waits in a temporary file, as uploads
do.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial
from io import BufferedReader, BytesIO, FileIO, IOBase
from tempfile import TemporaryFile
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured, RequestDataTooBig, SuspiciousOperation
from django.core.files.uploadedfile import UploadedFile as DjangoFile
from django.core.files.uploadhandler import FileUploadHandler
from django.http import HttpRequest, QueryDict, UnreadablePostError
from django.http.multipartparser import MultiPartParser
from django.utils.datastructures import MultiValueDict

from ..logs import escaped
from ..policy.fingerprints import is_json
from ..policy.invocation import Body, Form, Hashed, UploadedFile

CHUNK: Final = 64 * 1024
"""Bytes that are read at once."""


LONGEST: Final = 1024**3
"""The most bytes of a body that are read for its fingerprint; longer ones would fill the disk."""


def rewind(request: Any, stream: Any) -> None:
    """Give the stream back to the request, at its beginning."""
    stream.seek(0)
    _hand_on(request, stream)


def rewindable(request: Any) -> Any:
    """The request's stream, at its beginning, such that it can be read again."""
    stream = request._stream
    if not is_seekable(stream):
        if (announced(request) or 0) > LONGEST:
            raise _too_long()
        stream = spooled(stream, request.read, partial(_hand_on, request))
    rewind(request, stream)
    return stream


def _hand_on(request: Any, stream: Any) -> None:
    """Have the request read this stream."""
    # Django has no public API for this. REST framework relies on the same names.
    request._stream = stream
    request._read_started = False
    if "wsgi.input" in request.META:  # where some views stream from
        request.META["wsgi.input"] = stream


def spooled(source: Any, read: Callable[[int], bytes], hand_on: Callable[[Any], None]) -> Any:
    """The rest of a stream, in memory or in a temporary file.

    Args:
        source: the stream.
        read: reads so many bytes of it.
        hand_on: called with a stream of the same bytes, if not all of them can be read and kept.
    """
    spool: Any = BytesIO()
    unwritten = b""
    try:
        while unwritten := read(CHUNK):
            length = spool.tell() + len(unwritten)
            if isinstance(spool, BytesIO) and length > settings.FILE_UPLOAD_MAX_MEMORY_SIZE:
                spool = _in_file(spool.getvalue())
            while unwritten:  # a disk that is almost full takes a part
                unwritten = unwritten[spool.write(unwritten) :]
            if length > LONGEST:
                raise _too_long()
    except Exception as error:
        broken = isinstance(error, OSError) and not unwritten
        rest = _Begun(BytesIO(unwritten), _Broken(error) if broken else source)
        hand_on(_Begun(_Spool(spool), rest))
        raise
    return _Spool(spool)


def _in_file(data: bytes) -> Any:
    with TemporaryFile(dir=settings.FILE_UPLOAD_TEMP_DIR) as file:
        # Unbuffered: then it is known what it has taken when the disk is full.
        unbuffered = _File(os.dup(file.fileno()), "r+")
    while data:
        data = data[unbuffered.write(data) :]
    return unbuffered


class _Begun(IOBase):
    """A stream whose beginning was read already, at its beginning.

    Args:
        begun: what was read of it.
        rest: the stream.
    """

    def __init__(self, begun: Any, rest: Any) -> None:
        self._begun = begun
        self._rest = rest

    def read(self, size: int | None = -1, /) -> bytes:
        data: bytes = self._begun.read(size)
        if size is None or size < 0:
            return data + bytes(self._rest.read())
        return data or bytes(self._rest.read(size))

    def readline(self, size: int | None = -1, /) -> bytes:
        line: bytes = self._begun.readline(-1 if size is None else size)
        if line.endswith(b"\n") or len(line) == size:
            return line
        wanted = -1 if size is None or size < 0 else size - len(line)
        return line + bytes(self._rest.readline(wanted))


class _Broken(IOBase):
    """A stream that cannot be read. After an error, some servers' streams look as if they ended."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def read(self, *_: Any) -> bytes:
        raise self._error

    def readline(self, *_: Any) -> bytes:
        raise self._error


def _too_long() -> RequestDataTooBig:
    return RequestDataTooBig(
        f"A body of more than {LONGEST} bytes is too long to compare it with a retry. To allow "
        "longer bodies, give the view's idempotency policy fingerprint=fingerprints.without_body."
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
    stream = request._stream
    try:
        body: bytes = request.body
    except UnreadablePostError as error:
        _hand_on(request, _Broken(error))
        raise
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
            f"Only {received} of the {length} bytes of the body of {request.method} "
            f"{escaped(request.path)} have arrived, so nothing was executed. The client has "
            "closed the connection."
        )


def is_seekable(stream: Any) -> bool:
    """Whether a stream can be read again."""
    return bool(getattr(stream, "seekable", lambda: False)())


class _File(FileIO):
    """A file that is closed with its request. Python would warn of an open one."""

    def __del__(self) -> None:
        self.close()


class _Spool(BufferedReader):
    """A stream at its beginning. It is closed with its request, too."""

    def __init__(self, raw: Any) -> None:
        raw.seek(0)
        super().__init__(raw)

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


MULTIPART: Final = "multipart/form-data"
URLENCODED: Final = "application/x-www-form-urlencoded"


def body_of(request: Any) -> Body:
    """The body of a request: a form by field and file, anything else byte for byte.

    Raises:
        ImproperlyConfigured: the stream was read before, and it cannot be read again.
        RequestDataTooBig: it is JSON that no view may have in memory, or longer than ``LONGEST``.
        UnreadablePostError: its end is missing.
    """
    unseen = body_that_django_ignores(request)
    if unseen is not None:
        return unseen
    if request._read_started and not hasattr(request, "_body"):  # and it is no longer available
        return _parsed_before(request)
    if request.content_type == MULTIPART:
        return _multipart(request)
    raw = raw_body_of(request, in_memory=is_json(request.content_type or ""))
    if request.content_type == URLENCODED and isinstance(raw, bytes):
        try:
            return form_of(QueryDict(raw, encoding=request.encoding), MultiValueDict())
        except (SuspiciousOperation, LookupError):
            return raw  # too many fields, or no such charset: the view's to refuse, if it looks
    return raw


def as_file(raw: bytes | Hashed, name: str, media_type: str) -> UploadedFile:
    """A body that is one file."""
    body = hashed(BytesIO(raw)) if isinstance(raw, bytes) else raw
    return UploadedFile(
        field="file", name=name, media_type=media_type, size=body.size, sha256=body.sha256
    )


def body_that_django_ignores(request: HttpRequest) -> Hashed | None:
    """A chunked body under WSGI, which only views that read ``wsgi.input`` themselves can see.

    Django takes a request without a ``Content-Length`` for empty there.
    """
    meta = request.META
    chunked = "chunked" in meta.get("HTTP_TRANSFER_ENCODING", "").lower()
    if not (chunked and meta.get("wsgi.input_terminated")) or meta.get("CONTENT_LENGTH"):
        return None
    if not is_seekable(meta["wsgi.input"]):
        source, hand_on = meta["wsgi.input"], partial(meta.__setitem__, "wsgi.input")
        meta["wsgi.input"] = spooled(source, source.read, hand_on)
    return hashed(meta["wsgi.input"])


# Digests.


def _multipart(request: Any) -> Form | Hashed:
    """The form by field and file, without making use of the request's own upload handlers."""
    stream = request._stream if hasattr(request, "_body") else rewindable(request)
    # The length that was sent may be missing (a chunked body): then the view sees an empty form,
    # but a view that streams the body sees all of it.
    meta = {**request.META, "CONTENT_LENGTH": stream.seek(0, os.SEEK_END)}
    stream.seek(0)
    refuse_half(request, meta["CONTENT_LENGTH"])
    digests = _Digests()
    try:
        fields, _ = MultiPartParser(meta, stream, [digests], request.encoding).parse()
    except Exception:  # noqa: BLE001  # no form, or a large one: the view meets it, if it parses it
        stream.seek(0)
        return hashed(stream)
    finally:
        rewind(request, stream)
    named = {name: [str(value) for value in values] for name, values in fields.lists() if values}
    return Form(named, tuple(digests.files))


class _Digests(FileUploadHandler):
    """Notes of each uploaded file what identifies it, and keeps none, not even for the parser."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[UploadedFile] = []

    def new_file(self, *args: Any, **kwargs: Any) -> None:
        super().new_file(*args, **kwargs)
        self._sha256 = hashlib.sha256()

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:  # Django's
        self._sha256.update(raw_data)

    def file_complete(self, file_size: int) -> None:
        self.files.append(
            UploadedFile(
                field=self.field_name or "",
                name=self.file_name or "",
                media_type=self.content_type or "",
                size=file_size,
                sha256=self._sha256.hexdigest(),
            )
        )


# Parsed by other code: the CSRF middleware reads forms before any view, and one of django-ninja's
# those of PUT and PATCH.


def _parsed_before(request: HttpRequest) -> Form:
    if request.content_type == MULTIPART:
        # Django seals the handlers when it parses. What it has parsed is of use if it is kept.
        parsed = isinstance(request.upload_handlers, tuple) and hasattr(request, "_post")
        if parsed or request.POST or request.FILES:
            return form_of(request.POST, request.FILES)
    raise unreadable(f"The body of {request.method} {escaped(request.path)} was read as a stream")


def form_of(fields: Any, files: MultiValueDict[str, Any]) -> Form:
    """A form from Django's own parts of it; the files can be read again afterwards."""
    texts = {
        name: [str(value) for value in values if not isinstance(value, DjangoFile)]
        for name, values in fields.lists()
    }
    return Form(
        {name: values for name, values in texts.items() if values},
        tuple(uploaded(name, file) for name, group in files.lists() for file in group),
    )


def uploaded(field: str, file: Any) -> UploadedFile:
    """The parts of an uploaded file that are compared; it can be read again afterwards."""
    if not is_seekable(file):
        raise unreadable(f"The uploaded file {field!r} was taken by an upload handler")
    sha256 = hashlib.sha256()
    for chunk in file.chunks():
        sha256.update(chunk)
    file.seek(0)
    return UploadedFile(
        field=field,
        name=file.name or "",
        media_type=file.content_type or "",
        size=file.size or 0,
        sha256=sha256.hexdigest(),
    )


def unreadable(what: str) -> ImproperlyConfigured:
    """The error of a body that cannot be compared with a retry's."""
    return ImproperlyConfigured(
        f"{what} before the idempotency key was looked up, so the request cannot be compared with "
        "a retry. Protect the view outside the code that reads the body, or give its policy "
        "fingerprint=fingerprints.without_body."
    )
