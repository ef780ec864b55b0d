"""A record as stores keep it, and which request gets its key next: the same for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .codec import decode
from .records import Claim, Operation, Record, Status, new_token


class Row(NamedTuple):
    """What a store has written of a key, and what follows from it for the next request."""

    record_id: int
    status: str
    attempt: int
    fingerprint: str
    token: str
    hold: bool
    pinned: bool
    code: int
    headers: str
    body: bytes | memoryview | None
    lease_left: float | None
    """Seconds until its lease ends, by the store's clock."""
    ttl_left: float | None
    """Seconds until its time to live ends, likewise."""

    @property
    def expired(self) -> bool:
        """Whether its time to live is over; it is not looked at before the attempt has ended."""
        is_over = self.ttl_left is not None and self.ttl_left <= 0
        return is_over and self.status != Status.IN_PROGRESS

    @property
    def interrupted(self) -> bool:
        """Whether its owner is dead, or late."""
        is_over = self.lease_left is not None and self.lease_left <= 0
        return is_over and self.status == Status.IN_PROGRESS

    def record(self, key: str, scope: str) -> Record:
        """The record of its key."""
        completed = self.status == Status.COMPLETED
        return Record(
            key=key,
            scope=scope,
            status=Status(self.status),
            attempt=self.attempt,
            fingerprint=self.fingerprint,
            payload=decode(self.code, self.headers, self.body) if completed else None,
            expired=self.expired,
            interrupted=self.interrupted,
            held=self.interrupted and bool(self.hold),
            lease_left=None if self.lease_left is None else max(0.0, float(self.lease_left)),
            ttl_left=None if self.ttl_left is None else float(self.ttl_left),
            record_id=self.record_id,
        )

    def is_free(self, operation: Operation, has_steps: Callable[[], bool]) -> bool:
        """Whether an operation may have the key.

        Args:
            operation: wants it.
            has_steps: whether it has recovery points; called only if that makes a difference.
        """
        if self.begins_anew(operation):
            return True
        same = self.fingerprint == operation.fingerprint
        if self.status == Status.FAILED:
            return same or not (self.pinned or has_steps())
        return self.interrupted and same and not self.hold

    def begins_anew(self, operation: Operation) -> bool:
        """Whether its time to live is over, so that nothing of it counts for the operation."""
        return self.expired and not operation.refuse_expired

    def next_claim(self, operation: Operation) -> Claim:
        """The claim of an operation that may have the key."""
        resumes = self.fingerprint == operation.fingerprint and not self.begins_anew(operation)
        token = new_token(self.token if resumes else "")
        return Claim(
            operation, self.attempt + 1, token, self.record_id, interrupted=self.interrupted
        )

    def pins(self, operation: Operation) -> bool:
        """Whether that claim is pinned: it is unknown what an interrupted owner has done."""
        return self.interrupted or (self.pinned and not self.begins_anew(operation))
