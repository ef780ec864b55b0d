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
    return bytes(body)


def kept_headers(request: HttpRequest) -> list[tuple[str, str]]:
    """The headers, without credentials."""
    secret = {"cookie", *(name.lower() for name in conf.credential_headers)}
    return [(name, value) for name, value in request.headers.items() if name.lower() not in secret]
