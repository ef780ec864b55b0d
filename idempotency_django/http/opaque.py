"""Data that a client stores for this project and can neither read nor change.

Like a fingerprint (see ``seals.py``) they are encrypted with a synthetic initialisation vector
(RFC 5297), made of the one primitive that Django brings, HMAC-SHA-256: the keyed digest of the data
proves them, and the key stream depends on it. Only length and equality show.
"""

from __future__ import annotations

import base64
from operator import xor
from typing import Final

from django.conf import settings
from django.utils.crypto import constant_time_compare, salted_hmac

_DIGEST: Final = 32  # bytes of SHA-256


def concealed(data: bytes, *, salt: str) -> str:
    """The data as characters for a URL that only :func:`revealed` understands.

    Args:
        data: what is encrypted under the project's ``SECRET_KEY``.
        salt: the purpose; a token for one purpose is not valid for another.
    """
    return _concealed(data, salt, settings.SECRET_KEY)


def revealed(token: str, *, salt: str) -> bytes | None:
    """The data in a token; ``None``: this project did not make it for this purpose.

    What was made under one of ``SECRET_KEY_FALLBACKS`` is read, too.
    """
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    except ValueError:
        return None
    digest, hidden = raw[:_DIGEST], raw[_DIGEST:]
    for secret in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS):
        data = _masked(hidden, digest, salt, secret)
        if constant_time_compare(_concealed(data, salt, secret), token):
            return data
    return None


def _concealed(data: bytes, salt: str, secret: str | bytes) -> str:
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
