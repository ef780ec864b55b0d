"""The body of a request: it is read for the fingerprint, and the view can still read all of it.

It is read as ``request.body``, so Django hands it on to a view that parses the form, sets upload
handlers, takes ``request.body`` or streams. A body of more than ``DATA_UPLOAD_MAX_MEMORY_SIZE`` or
of an unknown length is left to the view alone.
"""

from __future__ import annotations

import hashlib
import os
from io import BytesIO
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured, SuspiciousOperation
from django.core.files.uploadedfile import UploadedFile as DjangoFile
from django.core.files.uploadhandler import MemoryFileUploadHandler
from django.http import HttpRequest, QueryDict, UnreadablePostError
from django.http.multipartparser import MultiPartParser
from django.utils.datastructures import MultiValueDict

from ..logs import escaped
from ..policy.invocation import Body, Form, Unread, UploadedFile

MULTIPART: Final = "multipart/form-data"
URLENCODED: Final = "application/x-www-form-urlencoded"


def body_of(request: Any) -> Body:
    """The body of a request: a form by field and file, anything else byte for byte.

    Raises:
        ImproperlyConfigured: the stream was read before, and it cannot be read again.
        UnreadablePostError: its end is missing.
    """
    if was_read(request):
        return _parsed_before(request)
    if is_too_large(request):
        return Unread(request.headers.get("Content-Digest", ""))
    raw = raw_body_of(request)
    if request.content_type == MULTIPART:
        return _multipart(request, raw)
    if request.content_type == URLENCODED:
        try:
            return form_of(QueryDict(raw, encoding=request.encoding), MultiValueDict())
        except (SuspiciousOperation, LookupError):
            return raw  # too many fields, or no such charset: the view's to refuse, if it looks
    return raw


def was_read(request: Any) -> bool:
    """Whether other code has taken the stream, and its bytes are no longer available."""
    return bool(request._read_started) and not hasattr(request, "_body")


def is_too_large(request: Any) -> bool:
    """Whether a body is larger than what Django has in memory, or of no known length."""
    if hasattr(request, "_body"):
        return False
    meta, limit = request.META, settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    length = meta.get("CONTENT_LENGTH")
    if not length and "wsgi.input" not in meta:  # ASGI, where all of the body has come already
        length = str(request._stream.seek(0, os.SEEK_END))
        request._stream.seek(0)
    elif not length:
        length = "unknown" if "HTTP_TRANSFER_ENCODING" in meta else "0"
    return not length.isdecimal() or (limit is not None and int(length) > limit)


def raw_body_of(request: Any) -> bytes:
    """The bytes of a body that is not too large; the view can read them again.

    Raises:
        UnreadablePostError: its end is missing, which some servers hand on when a client breaks
            off.
    """
    body: bytes = request.body
    length = int(request.META.get("CONTENT_LENGTH") or 0)
    if len(body) < length:
        raise UnreadablePostError(
            f"Only {len(body)} of the {length} bytes of the body of {request.method} "
            f"{escaped(request.path)} have arrived, so nothing was executed. The client has "
            "closed the connection."
        )
    if "wsgi.input" in request.META:  # where some views stream from
        request.META["wsgi.input"] = BytesIO(body)
    return body


class _InMemory(MemoryFileUploadHandler):
    """Keeps every file in memory, as the whole body is."""

    def handle_raw_input(self, *args: Any, **kwargs: Any) -> None:
        self.activated = True


def _multipart(request: Any, raw: bytes) -> Form | bytes:
    """The form by field and file, without making use of the request's own upload handlers."""
    # The length that was sent may be missing: then the view sees an empty form, but a view that
    # streams the body sees all of it.
    meta = {**request.META, "CONTENT_LENGTH": len(raw)}
    try:
        parser = MultiPartParser(meta, BytesIO(raw), [_InMemory()], request.encoding)
        return form_of(*parser.parse())
    except Exception:  # noqa: BLE001  # no form, or a large one: the view meets it, if it parses it
        return raw


def _parsed_before(request: HttpRequest) -> Form:
    """The form that the CSRF middleware has read, or django-ninja's one for PUT and PATCH."""
    if request.content_type == MULTIPART:
        # Django seals the handlers when it parses. What it has parsed is of use if it is kept.
        parsed = isinstance(request.upload_handlers, tuple) and hasattr(request, "_post")
        if parsed or request.POST or request.FILES:
            return form_of(request.POST, request.FILES)
    raise _unreadable(f"The body of {request.method} {escaped(request.path)} was read as a stream")


def form_of(fields: Any, files: MultiValueDict[str, Any]) -> Form:
    """A form from Django's own parts of it; the files can be read again afterwards."""
    texts = {
        name: [str(value) for value in values if not isinstance(value, DjangoFile)]
        for name, values in fields.lists()
    }
    return Form(
        {name: values for name, values in texts.items() if values},
        tuple(_uploaded(name, file) for name, group in files.lists() for file in group),
    )


def _uploaded(field: str, file: Any) -> UploadedFile:
    if not getattr(file, "seekable", bool)():
        raise _unreadable(f"The uploaded file {field!r} was taken by an upload handler")
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


def _unreadable(what: str) -> ImproperlyConfigured:
    """The error of a body that cannot be compared with a retry's."""
    return ImproperlyConfigured(
        f"{what} before the idempotency key was looked up, so the request cannot be compared with "
        "a retry. Protect the view outside the code that reads the body, or give its policy "
        "fingerprint=fingerprints.without_body."
    )
