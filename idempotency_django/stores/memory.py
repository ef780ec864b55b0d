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

from .base import Store
from .records import (
    Claim,
    Operation,
    Payload,
    Record,
    Status,
    Step,
    StoredPayload,
    encode,
    new_token,
    read_record,
)
from .transactions import forbid_transactions


@dataclass
class _Entry:
    operation: Operation
    token: str
    attempt: int
    steps: list[Step]
    status: Status = Status.IN_PROGRESS
    payload: StoredPayload | None = None
    started: float = field(default_factory=time.monotonic)
    lease_ends: float | None = None
    pinned: bool = False
    hold: bool = False

    @property
    def record(self) -> Record:
        now, ttl = time.monotonic(), self.operation.ttl
        leased = self.lease_ends is not None and self.status is Status.IN_PROGRESS
        lease_left = (self.lease_ends or 0.0) - now if leased else None
        ttl_left = None if ttl is None else self.started + ttl.total_seconds() - now
        attempt = (self.attempt, self.operation.fingerprint, self.token, self.hold, self.pinned)
        response = self.payload or (0, "[]", None)
        row = (0, self.status, *attempt, *response, lease_left, ttl_left)
        return read_record(self.operation.key, self.operation.scope, row)

    def purgeable(self, older_than: timedelta) -> bool:
        kept, age = self.operation.kept, time.monotonic() - self.started
        abandoned = self.record.interrupted and not self.hold
        has_ended = abandoned or self.status is not Status.IN_PROGRESS
        return has_ended and kept is not None and age >= (kept + older_than).total_seconds()


class MemoryStore(Store):
    """Keeps its records in this object; other processes do not see them.

    Nothing rolls back with it: a failed attempt frees its key, while its effects stay. Use the
    database store for effects that matter.
    """

    supports_steps: ClassVar[bool] = True

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._lock = threading.RLock()

    def acquire(self, operation: Operation) -> Claim | Record:
        forbid_transactions(f"The claim of {operation.name}")
        name = (operation.key, operation.scope)
        with self._lock:
            entry = self._entries.get(name)
            record = entry.record if entry else None
            if entry and record and not record.is_free(operation, lambda: bool(entry.steps)):
                return record
            claim = record.next_claim(operation) if record else Claim(operation, 1, new_token())
            made = self._entries[name] = _Entry(
                operation, claim.token, claim.attempt, [], hold=operation.hold
            )
            if entry and record and not record.begins_anew(operation):
                made.steps, made.pinned = entry.steps, record.pins(operation)
            if operation.lease is not None:
                made.lease_ends = made.started + operation.lease.total_seconds()
        return claim

    def complete(self, claim: Claim, payload: Payload, *, last: bool = False) -> bool:
        ended = time.monotonic()
        response = encode(payload)
        return self._change(claim, status=Status.COMPLETED, payload=response, started=ended)

    def fail(self, claim: Claim, error: str, *, pinned: bool = False, held: bool = False) -> bool:
        changes = {"pinned": True} if pinned else {}
        if not held:
            return self._change(claim, status=Status.FAILED, **changes)
        ended = time.monotonic()
        return self._change(claim, token=claim.origin, hold=True, lease_ends=ended, **changes)

    def extend(self, claim: Claim, seconds: float) -> bool:
        return self._change(claim, lease_ends=time.monotonic() + seconds)

    def get(self, key: str, scope: str) -> Record | None:
        with self._lock:
            entry = self._entries.get((key, scope))
            return entry.record if entry else None

    def steps(self, claim: Claim) -> Sequence[Step]:
        with self._lock:
            entry = self._entries.get((claim.key, claim.scope))
            return list(entry.steps) if entry else []

    def save_step(self, claim: Claim, step: Step) -> bool:
        with self._lock:
            return self._change(claim, steps=[*self.steps(claim), step])

    def record_replay(self, record: Record, operation: Operation, *, last: bool = False) -> None:
        with self._lock:
            entry = self._entries.get((record.key, record.scope))
            if entry and operation.extend_on_replay:
                entry.started = time.monotonic()

    def purge(self, older_than: timedelta, limit: int) -> int:
        with self._lock:
            names = [n for n, entry in self._entries.items() if entry.purgeable(older_than)]
            oldest = sorted(names, key=lambda name: self._entries[name].started)[:limit]
            for name in oldest:
                del self._entries[name]
            return len(oldest)

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

    def _change(self, claim: Claim, **changes: Any) -> bool:
        """Change the entry of a claim, if it is its owner's."""
        with self._lock:
            entry = self._entries.get((claim.key, claim.scope))
            if entry and entry.token == claim.token and entry.status is Status.IN_PROGRESS:
                self._entries[claim.key, claim.scope] = replace(entry, **changes)
                return True
            return False
