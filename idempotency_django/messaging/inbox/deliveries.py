"""What is taken of a request that delivers a message."""

from __future__ import annotations

from django.http import HttpRequest, UnreadablePostError
from django.http.request import RawPostDataException

from ...conf import conf
from ...errors import DeliveryMalformed, DeliveryTooLarge


def read_body(request: HttpRequest, at_most: int) -> bytes:
    """The body.

    Raises:
        DeliveryTooLarge: it has more bytes than that.
        DeliveryMalformed: it did not arrive.
    """
    length = request.META.get("CONTENT_LENGTH") or ""
    if length.isdecimal() and int(length[:20]) > at_most:
        raise DeliveryTooLarge
    try:
        # Not request.body, which has a limit of its own, unless a middleware has read it.
        body = request.body if hasattr(request, "_body") else request.read(at_most + 1)
    except (UnreadablePostError, RawPostDataException) as error:
        raise DeliveryMalformed("The body of the delivery could not be read.") from error
    if len(body) > at_most:
        raise DeliveryTooLarge
    if not body and _came_in_chunks(request):
        raise DeliveryMalformed(
            "The delivery came in chunks (Transfer-Encoding: chunked), without a Content-Length. "
            "Django reads no such body from a WSGI server. Put a proxy that buffers requests in "
            "front of the server, or serve the receiver by ASGI. Nothing was stored."
        )
    return bytes(body)


def _came_in_chunks(request: HttpRequest) -> bool:
    """Whether the request has a body that Django takes for an empty one, for want of a length."""
    encoding = request.META.get("HTTP_TRANSFER_ENCODING", "")
    no_length = not request.META.get("CONTENT_LENGTH")
    return no_length and "chunked" in encoding.lower() and "wsgi.input" in request.META


def kept_headers(request: HttpRequest) -> list[tuple[str, str]]:
    """The headers, without credentials."""
    secret = {"cookie", *(name.lower() for name in conf.credential_headers)}
    return [(name, value) for name, value in request.headers.items() if name.lower() not in secret]
