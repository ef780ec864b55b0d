"""Fingerprints as they are stored: sealed under ``SECRET_KEY``.

A plain digest of a request would let whoever steals the table test guesses: the number of a card
and its CVC are found within days. So a fingerprint is built as a synthetic-IV cipher is (RFC 5297):
a tag, HMAC-SHA-256 of what the request asks for and of who asks, and then the digest of what the
request asks for, encrypted under a key stream that depends on the tag. Equal requests have equal
fingerprints. Without the secret, nobody can make a fingerprint or test a guess. With it, the digest
can be recovered, from which
:meth:`~idempotency_django.engine.context.ExecutionContext.derive_key` derives its keys.

``SECRET_KEY_FALLBACKS`` are honoured: a retry that crosses a rotation is still recognised.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from typing import Final

from django.conf import settings
from django.utils.crypto import salted_hmac
from django.utils.encoding import force_bytes

from ..records import derived_key
from .canonical import framed

LENGTH: Final = 12
"""Bytes of a content digest: 96 bits tell apart all requests that ever use one key."""

_SALT: Final = "idempotency_django.fingerprint"
_TAG: Final = 16
_CHECK: Final = bytes(4)  # says after decryption whether the secret was the right one


def content_digest(*parts: bytes | str) -> str:
    """The digest of what a request asks for: 24 hexadecimal characters, without a secret."""
    return sha256(framed(*parts)).digest()[:LENGTH].hex()


def sealed(content: str, *bound: str) -> str:
    """The fingerprint of a content digest, bound to whom it is for: 64 hexadecimal characters.

    Args:
        content: from :func:`content_digest`.
        bound: what else must be equal in a retry: the principal, the host.
    """
    return _sealed(_secret(), content, bound)


def sealed_before(content: str, *bound: str) -> tuple[str, ...]:
    """The same fingerprint under each of ``SECRET_KEY_FALLBACKS``."""
    return tuple(_sealed(secret, content, bound) for secret in _fallbacks())


def content_of(fingerprint: str) -> str | None:
    """The content digest in a fingerprint; ``None``: no known secret has sealed it."""
    try:
        stored = bytes.fromhex(fingerprint)
    except ValueError:
        return None
    tag, encrypted = stored[:_TAG], stored[_TAG:]
    for secret in (_secret(), *_fallbacks()):
        opened = _xor(encrypted, _stream(secret, tag))
        if len(opened) == LENGTH + len(_CHECK) and opened.endswith(_CHECK):
            return opened[:LENGTH].hex()
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


def _sealed(secret: bytes, content: str, bound: tuple[str, ...]) -> str:
    tag = hmac.digest(_key(secret, "tag"), framed(content, *bound), "sha256")[:_TAG]
    return (tag + _xor(bytes.fromhex(content) + _CHECK, _stream(secret, tag))).hex()


def _stream(secret: bytes, tag: bytes) -> bytes:
    return hmac.digest(_key(secret, "stream"), tag, "sha256")


def _xor(data: bytes, stream: bytes) -> bytes:
    made = int.from_bytes(data) ^ int.from_bytes(stream[: len(data)])
    return made.to_bytes(len(data))


@lru_cache(maxsize=32)
def _key(secret: bytes, purpose: str) -> bytes:
    return salted_hmac(_SALT, purpose, secret=secret, algorithm="sha256").digest()


def _secret() -> bytes:
    return force_bytes(settings.SECRET_KEY)


def _fallbacks() -> list[bytes]:
    return [force_bytes(secret) for secret in settings.SECRET_KEY_FALLBACKS]
