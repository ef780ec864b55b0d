"""A store in the memory of one process, for the tests of projects that use this package."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar

from django.conf import settings
from django.core.checks import CheckMessage, Warning  # noqa: A004  # Django's name

from .atomic_blocks import forbid_transactions
from .base import Store
from .codec import StoredPayload, decode, decode_step, dump_text, encode, encode_step
from .records import Claim, Operation, Payload, Record, Status, Step, new_token


@dataclass
class _Entry:
    operation: Operation
    token: str
    attempt: int
    steps: list[Step]
    status: Status = Status.IN_PROGRESS
    payload: StoredPayload | None = None
    error: str = ""
    replays: int = 0
    started: float = field(default_factory=time.monotonic)
    lease_ends: float | None = None
    pinned: bool = False
    hold: bool = False

    def lived_beyond(self, *durations: timedelta | None) -> bool:
        seconds = [duration.total_seconds() for duration in durations if duration is not None]
        return len(seconds) == len(durations) and time.monotonic() - self.started >= sum(seconds)

    @property
    def expired(self) -> bool:
        return self.status is not Status.IN_PROGRESS and self.lived_beyond(self.operation.ttl)

    @property
    def interrupted(self) -> bool:
        lapsed = self.lease_ends is not None and time.monotonic() >= self.lease_ends
        return self.status is Status.IN_PROGRESS and lapsed

    @property
    def lease_left(self) -> float | None:
        if self.lease_ends is None or self.status is not Status.IN_PROGRESS:
            return None
        return max(0.0, self.lease_ends - time.monotonic())

    @property
    def ttl_left(self) -> float | None:
        ttl = self.operation.ttl
        return None if ttl is None else self.started + ttl.total_seconds() - time.monotonic()

    def freed_by_age(self, operation: Operation) -> bool:
        """Whether its time to live is over, so that nothing of it counts any more."""
        return self.expired and not operation.refuse_expired

    def purgeable(self, older_than: timedelta) -> bool:
        operation = self.operation
        ended = self.interrupted and not self.hold
        return (self.status is not Status.IN_PROGRESS or ended) and self.lived_beyond(
            operation.ttl, operation.retention, older_than
        )

    def is_of(self, operation: Operation) -> bool:
        return self.operation.fingerprint == operation.fingerprint

    def free_for(self, operation: Operation) -> bool:
        if self.freed_by_age(operation):
            return True
        same = self.is_of(operation)
        if self.status is Status.FAILED:
            return same or not (self.pinned or self.steps)
        return self.interrupted and same and not self.hold


class MemoryStore(Store):
    """Keeps its records in this object; other processes do not see them.

    Nothing rolls back with it: a failed attempt frees its key, while its effects stay. Use the
    database store for effects that matter.
    """

    supports_steps: ClassVar[bool] = True

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._lock = threading.Lock()

    def acquire(self, operation: Operation) -> Claim | Record:
        forbid_transactions(f"The claim of {operation.name}")
        name = (operation.key, operation.scope)
        with self._lock:
            entry = self._entries.get(name)
            if entry and not entry.free_for(operation):
                return self._record(entry)
            attempt = entry.attempt + 1 if entry else 1
            counts = bool(entry and not entry.freed_by_age(operation))
            steps = entry.steps if entry and counts else []
            late = bool(entry and entry.interrupted)
            pinned = bool(entry and counts and (entry.pinned or late))
            resumed = entry and counts and entry.is_of(operation)
            token = new_token(entry.token if entry and resumed else "")
            made = self._entries[name] = _Entry(
                operation, token, attempt, steps, pinned=pinned, hold=operation.hold
            )
            if operation.lease is not None:
                made.lease_ends = made.started + operation.lease.total_seconds()
        return Claim(operation, attempt, token, interrupted=late)

    def complete(self, claim: Claim, payload: Payload, *, last: bool = False) -> bool:
        ended = time.monotonic()
        response = encode(payload)
        return self._change(claim, status=Status.COMPLETED, payload=response, started=ended)

    def fail(self, claim: Claim, error: str, *, pinned: bool = False, held: bool = False) -> bool:
        changes: dict[str, Any] = {"error": dump_text(error)} | ({"pinned": True} if pinned else {})
        if not held:
            return self._change(claim, status=Status.FAILED, **changes)
        ended = time.monotonic()
        return self._change(claim, token=claim.origin, hold=True, lease_ends=ended, **changes)

    def extend(self, claim: Claim, seconds: float) -> bool:
        return self._change(claim, lease_ends=time.monotonic() + seconds)

    def get(self, key: str, scope: str) -> Record | None:
        with self._lock:
            entry = self._entries.get((key, scope))
            return self._record(entry) if entry else None

    def steps(self, claim: Claim) -> Sequence[Step]:
        with self._lock:
            entry = self._owned(claim)
            return [decode_step(step) for step in entry.steps] if entry else []

    def save_step(self, claim: Claim, step: Step) -> bool:
        with self._lock:
            entry = self._owned(claim)
            if entry:
                entry.steps.append(encode_step(step))
            return entry is not None

    def record_replay(self, record: Record, operation: Operation) -> None:
        with self._lock:
            entry = self._entries.get((record.key, record.scope))
            if entry:
                entry.replays += operation.count_replays
                if operation.extend_on_replay:
                    entry.started = time.monotonic()

    def purge(self, older_than: timedelta, limit: int) -> int:
        with self._lock:
            names = [n for n, entry in self._entries.items() if entry.purgeable(older_than)]
            oldest = sorted(names, key=lambda name: self._entries[name].started)[:limit]
            for name in oldest:
                del self._entries[name]
            return len(oldest)

    def purgeable(self, older_than: timedelta) -> int:
        with self._lock:
            return sum(entry.purgeable(older_than) for entry in self._entries.values())

    def check(self) -> Sequence[CheckMessage]:
        if settings.DEBUG:
            return []
        return [
            Warning(
                f"The store {self.alias!r} has its records in the memory of one process, but "
                "DEBUG is off.",
                hint=(
                    "Other processes do not see the records and a restart loses them, so retries "
                    "are executed again. Use DatabaseStore, CachedStore or RedisStore in "
                    "production. If these are the settings of a test suite, add "
                    "'idempotency_django.W026' to SILENCED_SYSTEM_CHECKS."
                ),
                id="idempotency_django.W026",
            )
        ]

    def _owned(self, claim: Claim) -> _Entry | None:
        entry = self._entries.get((claim.key, claim.scope))
        if entry and entry.token == claim.token and entry.status is Status.IN_PROGRESS:
            return entry
        return None

    def _change(self, claim: Claim, **changes: Any) -> bool:
        """Change the entry of a claim, if it is its owner's."""
        with self._lock:
            entry = self._owned(claim)
            if entry is None:
                return False
            self._entries[claim.key, claim.scope] = replace(entry, **changes)
            return True

    @staticmethod
    def _record(entry: _Entry) -> Record:
        return Record(
            key=entry.operation.key,
            scope=entry.operation.scope,
            status=entry.status,
            attempt=entry.attempt,
            fingerprint=entry.operation.fingerprint,
            payload=decode(*entry.payload) if entry.payload else None,
            expired=entry.expired,
            interrupted=entry.interrupted,
            held=entry.interrupted and entry.hold,
            lease_left=entry.lease_left,
            ttl_left=entry.ttl_left,
        )
