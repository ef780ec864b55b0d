"""Fingerprints and tokens as they leave the process: encrypted under ``SECRET_KEY``.

A plain digest of a request would let a thief of the table test guesses: the number of a card
and its CVC are found within days. So a fingerprint is built as a synthetic-IV cipher is (RFC 5297):
a tag, HMAC-SHA-256 of what the request asks for and of who asks, and then the digest of what the
request asks for, encrypted under a key stream that depends on the tag. Equal requests have equal
fingerprints. Without the secret, an attacker cannot make a fingerprint or test a guess. With it,
the digest can be recovered. Its HMAC under the same secret is what
:meth:`~idempotency_django.engine.context.ExecutionContext.derive_key` derives its keys from.

A token in a URL is the same: a tag of its data, and the data under a key stream of the tag.

``SECRET_KEY_FALLBACKS`` are honoured: a retry that crosses a rotation is still recognised.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from django.conf import settings
from django.utils.crypto import salted_hmac

from ..stores.records import derived_key
from .digests import LENGTH

_SALT: Final = "idempotency_django.fingerprint"
_BLOCK: Final = 32  # bytes of SHA-256
_TAG: Final = 16
_CHECK: Final = bytes(4)  # says after decryption whether the secret was the right one


def sealed(content: str, tagged: bytes) -> dict[str, str]:
    """The fingerprints of a content digest, bound to whom it is for: 64 hexadecimal characters.

    Each is there with the HMAC of the content under the same secret, for derived keys. Like the
    content, it is the same for all whom the request is for.

    Args:
        content: from :func:`~idempotency_django.policy.digests.content_digest`.
        tagged: the content digest, and what else must be equal in a retry, such as the scope, the
            principal and the host; :func:`framed <idempotency_django.policy.digests.framed>`.

    Returns:
        The fingerprint, and after it the same under each of ``SECRET_KEY_FALLBACKS``.
    """
    opened = bytes.fromhex(content) + _CHECK
    fingerprints = {}
    for secret in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS):
        tag = hmac.digest(_keys(secret)[0], tagged, "sha256")[:_TAG]
        fingerprint = (tag + _masked(opened, _keys(secret)[1], tag)).hex()
        fingerprints[fingerprint] = _keyed(opened, secret)
    return fingerprints


def content_of(fingerprint: str) -> str | None:
    """The HMAC of the content in a fingerprint; ``None``: no known secret has sealed it."""
    try:
        stored = bytes.fromhex(fingerprint)
    except ValueError:
        return None
    tag, encrypted = stored[:_TAG], stored[_TAG:]
    for secret in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS):
        opened = _masked(encrypted, _keys(secret)[1], tag)
        if len(opened) == LENGTH + len(_CHECK) and opened.endswith(_CHECK):
            return _keyed(opened, secret)
    return None


def derived_keys(*, scope: str, key: str, fingerprint: str, names: Iterable[str]) -> dict[str, str]:
    """The keys that ``derive_key()`` gave the handler of a stored operation, by name.

    Args:
        scope: the record's scope.
        key: the record's key.
        fingerprint: the record's fingerprint.
        names: what the keys are for, such as ``"charge"``.

    Raises:
        ValueError: no known secret key has sealed the fingerprint.
    """
    content = content_of(fingerprint)
    if content is None:
        raise ValueError(
            "The record's fingerprint was sealed under a secret key that is neither SECRET_KEY nor "
            "among SECRET_KEY_FALLBACKS, so its derived keys cannot be computed. Add that key to "
            "SECRET_KEY_FALLBACKS."
        )
    return {name: derived_key(scope=scope, key=key, content=content, name=name) for name in names}


def _keyed(opened: bytes, secret: str | bytes) -> str:
    """The secret material for the derived keys of a sealed request."""
    return hmac.digest(_keys(secret)[2], opened, "sha256")[:LENGTH].hex()


def encrypt_token(data: bytes, *, salt: str) -> str:
    """The data as characters for a URL that only :func:`decrypt_token` understands.

    Args:
        data: what is encrypted under the project's ``SECRET_KEY``.
        salt: the purpose; a token for one purpose is not valid for another.
    """
    tag_key, stream_key, _ = _keys(settings.SECRET_KEY, salt)
    tag = hmac.digest(tag_key, data, "sha256")[:_TAG]
    return base64.urlsafe_b64encode(tag + _masked(data, stream_key, tag)).decode().rstrip("=")


def decrypt_token(token: str, *, salt: str) -> bytes | None:
    """The data in a token; ``None``: this project did not make it for this purpose.

    What was made under one of ``SECRET_KEY_FALLBACKS`` is read, too.
    """
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    except ValueError:
        return None
    tag, encrypted = raw[:_TAG], raw[_TAG:]
    made = base64.urlsafe_b64encode(raw).decode().rstrip("=") == token
    for secret in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS):
        tag_key, stream_key, _ = _keys(secret, salt)
        data = _masked(encrypted, stream_key, tag)
        if hmac.compare_digest(hmac.digest(tag_key, data, "sha256")[:_TAG], tag) and made:
            return data
    return None


def _masked(data: bytes, key: bytes, tag: bytes) -> bytes:
    """The data under the key stream of a tag, or freed from it."""
    stream = hmac.digest(key, tag, "sha256")
    for block in range(1, -(-len(data) // _BLOCK)):
        stream += hmac.digest(key, b"%s %d" % (tag, block), "sha256")
    masked = int.from_bytes(data) ^ int.from_bytes(stream[: len(data)])
    return masked.to_bytes(len(data))


@lru_cache(maxsize=16)
def _keys(secret: str | bytes, salt: str = _SALT) -> tuple[bytes, bytes, bytes]:
    """The keys of tags, of key streams, and of what derived keys are made of."""
    tag, stream, derived = (
        salted_hmac(salt, purpose, secret=secret, algorithm="sha256").digest()
        for purpose in ("tag", "stream", "derived")
    )
    return tag, stream, derived
