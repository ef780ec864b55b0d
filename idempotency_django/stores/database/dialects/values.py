"""Values as the statements take them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from ....records import Claim, Operation


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


VALUES = (
    "key scope operation fingerprint owner_token principal method path caused_by hold "
    "ttl kept lease"
).split()
"""The names of what :func:`values_of` gives."""


def values_of(operation: Operation, token: str) -> list[Any]:
    """The parameters of ``insert_sql``, in the order of its columns."""
    ttl = None if operation.ttl is None else operation.ttl.total_seconds()
    kept = None if ttl is None else ttl + operation.retention.total_seconds()
    return [
        operation.key,
        operation.scope,
        plain(operation.name, 255),
        operation.fingerprint,
        token,
        plain(operation.principal, 255),
        plain(operation.method, 16),
        plain(operation.path, 2048),
        operation.caused_by,
        operation.hold,
        ttl,
        kept,
        None if operation.lease is None else operation.lease.total_seconds(),
    ]
