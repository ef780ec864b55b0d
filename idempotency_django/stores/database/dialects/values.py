"""Values as the statements take them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Final

from ....records import Claim, Operation

_PLAIN: Final = re.compile(
    r"[\x01-\x09\x0b-\x7f]{0,255}\n[\x01-\x09\x0b-\x7f]{0,255}\n"
    r"[\x01-\x09\x0b-\x7f]{0,16}\n[\x01-\x09\x0b-\x7f]{0,2048}"
)
"""A name, a principal, a method and a path, one a line, that :func:`plain` leaves as they are."""


def plain(text: str, limit: int) -> str:
    """The text, cut to a column's length and rid of what a database refuses (NUL, surrogates)."""
    return (
        text[:limit].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
    )


def ids_of(claims: Sequence[Claim]) -> list[int]:
    return [claim.record_id for claim in claims]


def tokens_of(claims: Sequence[Claim]) -> list[str]:
    """The owners' tokens: each is of one claim only, so that a set of them need not be paired."""
    return [claim.token for claim in claims]


def lock_digest(operation: Operation, size: int) -> bytes:
    name = f"idempotency_django:{len(operation.key)}:{operation.key}{operation.scope}"
    return hashlib.blake2b(name.encode(), digest_size=size).digest()


def lock_number(operation: Operation) -> int:
    """The number of PostgreSQL's advisory lock on the operation's key."""
    return int.from_bytes(lock_digest(operation, 8), signed=True)


def values_of(operation: Operation, token: str) -> dict[str, Any]:
    """The parameters of the statements that claim, besides the lock."""
    ttl = None if operation.ttl is None else operation.ttl.total_seconds()
    texts = operation.name, operation.principal, operation.method, operation.path
    if not _PLAIN.fullmatch("\n".join(texts)):  # which few are not
        limits = 255, 255, 16, 2048
        texts = tuple(map(plain, texts, limits))  # type: ignore[assignment]
    name, principal, method, path = texts
    return {
        "key": operation.key,
        "scope": operation.scope,
        "operation": name,
        "fingerprint": operation.fingerprint,
        "owner_token": token,
        "principal": principal,
        "method": method,
        "path": path,
        "caused_by": operation.caused_by,
        "hold": operation.hold,
        "ttl": ttl,
        "kept": None if ttl is None else ttl + operation.retention.total_seconds(),
        "lease": None if operation.lease is None else operation.lease.total_seconds(),
    }
