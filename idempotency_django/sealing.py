"""Data that a client carries for this project and cannot read or change.

It is encryption with a synthetic initialisation vector (Rogaway and Shrimpton, "Deterministic
Authenticated-Encryption", 2006), made of the one primitive that Django brings, HMAC-SHA-256. The
keyed digest of the data proves it, and is what the keystream begins with; the keystream is the same
HMAC over a counter. Equal data are sealed alike, so nothing but length and equality shows.
"""

from __future__ import annotations

import base64
from operator import xor
from typing import Final

from django.conf import settings
from django.utils.crypto import constant_time_compare, salted_hmac

_DIGEST: Final = 32  # bytes of SHA-256


def sealed(data: bytes, *, salt: str) -> str:
    """The data as characters for a URL that only :func:`unsealed` understands.

    Args:
        data: what is sealed under the project's ``SECRET_KEY``.
        salt: the purpose; what was sealed for one is nothing for another.
    """
    return _sealed(data, salt, settings.SECRET_KEY)


def unsealed(token: str, *, salt: str) -> bytes | None:
    """The data in a token; ``None``: this project has not sealed it for this purpose.

    Data that were sealed under one of ``SECRET_KEY_FALLBACKS`` are read, too.
    """
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    except ValueError:
        return None
    digest, hidden = raw[:_DIGEST], raw[_DIGEST:]
    for secret in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS):
        data = _masked(hidden, digest, salt, secret)
        if constant_time_compare(_sealed(data, salt, secret), token):
            return data
    return None


def _sealed(data: bytes, salt: str, secret: str | bytes) -> str:
    digest = _keyed(f"{salt}.digest", data, secret)
    raw = digest + _masked(data, digest, salt, secret)
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _masked(data: bytes, digest: bytes, salt: str, secret: str | bytes) -> bytes:
    """The data under the keystream that begins with the digest, or freed from it."""
    blocks = range(-(-len(data) // _DIGEST))
    stream = b"".join(_keyed(f"{salt}.stream", b"%d:" % n + digest, secret) for n in blocks)
    return bytes(map(xor, data, stream))


def _keyed(purpose: str, data: bytes, secret: str | bytes) -> bytes:
    return salted_hmac(purpose, data, secret=secret, algorithm="sha256").digest()
