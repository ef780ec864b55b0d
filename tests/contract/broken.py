"""Stores that break one promise of the contract each; the state machine must catch them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from idempotency_django.stores.codec import encode
from idempotency_django.stores.memory import MemoryStore, _Entry
from idempotency_django.stores.records import Claim, Operation, Payload, Record, Status, Step


class _Broken(MemoryStore):
    def entry(self, of: Any) -> _Entry | None:
        return self._entries.get((of.key, of.scope))

    def as_owner(self, claim: Claim) -> Claim:
        """The claim with the token of whoever has one now."""
        entry = self.entry(claim)
        return replace(claim, token=entry.token) if entry else claim

    def acquire_as_if(self, operation: Operation, /, **changes: Any) -> Claim | Record:
        """Acquire as if the record were another; it is itself again where that was refused."""
        name = (operation.key, operation.scope)
        entry = self._entries[name]
        self._entries[name] = replace(entry, **changes)
        found = super().acquire(operation)
        if isinstance(found, Record):
            self._entries[name] = entry
            return entry.record
        return found


class LateOwnersComplete(_Broken):
    """Whoever has a response stores it: the token is ignored."""

    def complete(self, claim: Claim, payload: Payload, *, last: bool = False) -> bool:
        return super().complete(self.as_owner(claim), payload)


class LateOwnersFail(_Broken):
    """A late owner releases its successor's claim."""

    def fail(self, claim: Claim, error: str, *, pinned: bool = False, held: bool = False) -> bool:
        return super().fail(self.as_owner(claim), error, pinned=pinned, held=held)


class LateOwnersExtend(_Broken):
    """A late owner renews its successor's lease."""

    def extend(self, claim: Claim, seconds: float) -> bool:
        return super().extend(self.as_owner(claim), seconds)


class LateOwnersSaveSteps(_Broken):
    """A late owner stores recovery points."""

    def save_step(self, claim: Claim, step: Step) -> bool:
        return super().save_step(self.as_owner(claim), step)


class RefusedButWritten(_Broken):
    """A late owner is told that nothing was written, while its response was."""

    def complete(self, claim: Claim, payload: Payload, *, last: bool = False) -> bool:
        done = super().complete(claim, payload)
        return done or (super().complete(self.as_owner(claim), payload) and False)


class ExtendsNothing(_Broken):
    """The owner is told that its lease goes on, and it does not."""

    def extend(self, claim: Claim, seconds: float) -> bool:
        entry = self.entry(claim)
        return bool(entry and entry.token == claim.token and entry.status is Status.IN_PROGRESS)


class TwoOwners(_Broken):
    """Takes over what is in progress, whether the lease is over or not."""

    def acquire(self, operation: Operation) -> Claim | Record:
        if self.entry(operation):
            return self.acquire_as_if(operation, lease_ends=0.0)
        return super().acquire(operation)


class ResumesHeld(_Broken):
    """Takes over held records as well."""

    def acquire(self, operation: Operation) -> Claim | Record:
        entry = self.entry(operation)
        if entry and entry.row.interrupted:
            return self.acquire_as_if(operation, hold=False)
        return super().acquire(operation)


class ResumesForAnother(_Broken):
    """Takes over an interrupted record for another request."""

    def acquire(self, operation: Operation) -> Claim | Record:
        entry = self.entry(operation)
        if entry and entry.row.interrupted:
            same = replace(entry.operation, fingerprint=operation.fingerprint)
            return self.acquire_as_if(operation, operation=same)
        return super().acquire(operation)


class StepsForAnother(_Broken):
    """Gives the steps of a failed attempt to another request."""

    def acquire(self, operation: Operation) -> Claim | Record:
        entry = self.entry(operation)
        if entry and entry.status is Status.FAILED:
            same = replace(entry.operation, fingerprint=operation.fingerprint)
            return self.acquire_as_if(operation, operation=same)
        return super().acquire(operation)


class ForgetsPins(_Broken):
    """A pinned key is free for any request."""

    def fail(self, claim: Claim, error: str, *, pinned: bool = False, held: bool = False) -> bool:
        return super().fail(claim, error, held=held)


class Wedged(_Broken):
    """Nobody resumes what was interrupted."""

    def acquire(self, operation: Operation) -> Claim | Record:
        entry = self.entry(operation)
        return entry.record if entry and entry.row.interrupted else super().acquire(operation)


class CountsAnew(_Broken):
    """Each attempt is the first."""

    def acquire(self, operation: Operation) -> Claim | Record:
        if self.entry(operation):
            return self.acquire_as_if(operation, attempt=0)
        return super().acquire(operation)


class ForgetsSteps(_Broken):
    """A failed attempt takes its recovery points with it."""

    def fail(self, claim: Claim, error: str, *, pinned: bool = False, held: bool = False) -> bool:
        failed = super().fail(claim, error, pinned=pinned, held=held)
        entry = self.entry(claim)
        if failed and entry:
            entry.steps = []
        return failed


class KeepsSteps(_Broken):
    """The recovery points outlive their record."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._kept: dict[tuple[str, str], list[Step]] = {}

    def acquire(self, operation: Operation) -> Claim | Record:
        entry = self.entry(operation)
        steps = list(entry.steps) if entry else []
        found = super().acquire(operation)
        if isinstance(found, Claim):
            self._kept[found.key, found.scope] = steps
        return found

    def steps(self, claim: Claim) -> Sequence[Step]:
        return super().steps(claim) or self._kept[claim.key, claim.scope]


class ChangesAnswers(_Broken):
    """A second response takes the place of the first."""

    def complete(self, claim: Claim, payload: Payload, *, last: bool = False) -> bool:
        entry = self.entry(claim)
        if entry and entry.status is Status.COMPLETED:
            entry.payload = encode(payload)
        return super().complete(claim, payload)


class ReplaysForEver(_Broken):
    """A response has no end."""

    def acquire(self, operation: Operation) -> Claim | Record:
        entry = self.entry(operation)
        completed = entry and entry.status is Status.COMPLETED
        return entry.record if entry and completed else super().acquire(operation)


class ResponsesAgeBeforeTheyAreStored(_Broken):
    """The time to live counts from the claim, so that a slow attempt's response has none."""

    def complete(self, claim: Claim, payload: Payload, *, last: bool = False) -> bool:
        claimed = self.entry(claim)
        completed = super().complete(claim, payload)
        entry = self.entry(claim)
        if claimed and entry and completed:
            entry.started = claimed.started
        return completed


class _Purges(_Broken):
    def goes(self, entry: _Entry, older_than: timedelta) -> bool:
        raise NotImplementedError

    def purge(self, older_than: timedelta, limit: int) -> int:
        names = [n for n, entry in self._entries.items() if self.goes(entry, older_than)][:limit]
        for name in names:
            del self._entries[name]
        return len(names)


class PurgesRunning(_Purges):
    """A purge takes what runs for longer than its time to live."""

    def goes(self, entry: _Entry, older_than: timedelta) -> bool:
        return entry.lived_beyond(entry.operation.ttl, entry.operation.retention, older_than)


class PurgesHeld(_Purges):
    """A purge takes what waits for an operator."""

    def goes(self, entry: _Entry, older_than: timedelta) -> bool:
        ended = entry.status is not Status.IN_PROGRESS or entry.row.interrupted
        operation = entry.operation
        return ended and entry.lived_beyond(operation.ttl, operation.retention, older_than)


class PurgesAlive(_Purges):
    """A purge takes what is settled, however fresh it is."""

    def goes(self, entry: _Entry, older_than: timedelta) -> bool:
        return entry.status is not Status.IN_PROGRESS


BROKEN: Final[dict[type[MemoryStore], str]] = {
    LateOwnersComplete: "not the owner could complete",
    LateOwnersFail: "not the owner could fail",
    LateOwnersExtend: "not the owner could extend",
    LateOwnersSaveSteps: "not the owner could save a step",
    RefusedButWritten: "is there, not",
    ExtendsNothing: "is there, not",
    TwoOwners: "Two owners",
    ResumesHeld: "Two owners",
    ResumesForAnother: "Two owners",
    StepsForAnother: "Two owners",
    ForgetsPins: "Two owners",
    Wedged: "wedged",
    CountsAnew: "Attempt 1 comes after 1",
    ForgetsSteps: "The steps are|Two owners",  # what has no steps is free for another request
    KeepsSteps: "The steps are",
    ChangesAnswers: "is there, not",
    ReplaysForEver: "wedged",
    ResponsesAgeBeforeTheyAreStored: "is there, not",
    PurgesRunning: "A purge took",
    PurgesHeld: "A purge took",
    PurgesAlive: "A purge took",
}
"""Each store, and what the machine says of it."""
