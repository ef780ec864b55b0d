"""What adapters, policy, engine and stores share: frozen values that know neither HTTP nor DRF."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final


class Status(StrEnum):
    """The state of an operation."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One logical operation, as an adapter and its policy describe it to the engine.

    Attributes:
        key: the string that names the operation; 1-255 visible ASCII characters.
        scope: the namespace the key is unique in; at most 255 printable ASCII characters.
        name: which operation this is, for people (``"POST /api/charges/"``).
        fingerprint: HMAC-SHA-256 of what the request asks for and who asks, 64 hexadecimal
            characters. Keys are derived from it.
        former_fingerprints: those of the same request under ``SECRET_KEY_FALLBACKS``.
        ttl: how long a completed record is replayed; ``None``: forever.
        retention: how long the expired record is kept for the audit before it may be purged.
        refuse_expired: do not execute it while there is a completed record of its key, expired or
            not.
        lease: how long a claim on it lives without renewal; ``None``: the claim lives as long as
            the transaction that made it.
        max_duration: how long an attempt's lease is renewed; ``None``: as long as its handler runs.
        hold: do not resume an attempt whose lease expired until an operator settles it.
        max_attempts: how many attempts may fail or be interrupted before an operator must settle
            it; ``None``: any number.
        wait: how long to wait for another execution of it; ``None``: not at all.
        count_replays: record its replays in the audit trail.
        extend_on_replay: count ``ttl`` and ``retention`` from the last use, not the first.
        principal: who is calling (``"user:42"``), or a name of an unknown caller's
            ``Authorization`` header; empty: unknown.
        method: the HTTP method, or what stands for it elsewhere; for the audit.
        path: the HTTP path, or what stands for it elsewhere; for the audit.
        caused_by: the :func:`reference` of the record whose handler asked for this operation; for
            the audit. Empty: there is none.
        cause_reference: what its effects name as their cause; empty: the reference of its record.
    """

    key: str
    scope: str
    name: str
    fingerprint: str
    ttl: timedelta | None
    former_fingerprints: tuple[str, ...] = ()
    retention: timedelta = timedelta(0)
    refuse_expired: bool = False
    lease: timedelta | None = None
    max_duration: timedelta | None = None
    hold: bool = False
    max_attempts: int | None = None
    wait: timedelta | None = None
    count_replays: bool = False
    extend_on_replay: bool = False
    principal: str = ""
    method: str = ""
    path: str = ""
    caused_by: str = ""
    cause_reference: str = ""

    @property
    def kept(self) -> timedelta | None:
        """How long a completed record is kept. ``None`` is forever."""
        return None if self.ttl is None else self.ttl + self.retention

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprints that a record of the same request may have."""
        return (self.fingerprint, *self.former_fingerprints)


def reference(key: str, scope: str) -> str:
    """One text that names a record. A key holds no space, so :func:`referred` can take it apart."""
    return f"{key} {scope}"


_REFERENCE: Final = re.compile(r"[\x21-\x7e]{1,255} [\x20-\x7e]{1,255}")


def is_reference(text: object) -> bool:
    """Whether a text from elsewhere, such as a message, can be a :func:`reference`."""
    return isinstance(text, str) and _REFERENCE.fullmatch(text) is not None


def referred(reference: str) -> tuple[str, str]:
    """The key and the scope of the record that a :func:`reference` names."""
    key, _, scope = reference.partition(" ")
    return key, scope


ORIGIN_LENGTH: Final = 16
"""The tokens of all attempts at a record have so many first characters in common, half of each."""


def new_token(before: str = "") -> str:
    """A token for the next owner of a record.

    Args:
        before: the token of the attempt that it resumes; empty: it resumes none.
    """
    token = os.urandom(ORIGIN_LENGTH).hex()
    return before[:ORIGIN_LENGTH] + token[len(before[:ORIGIN_LENGTH]) :]


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to execute ``operation``, held by the one owner of ``token``.

    Attributes:
        operation: what may be executed.
        attempt: 1 for the first execution of this key, and one more for each later one.
        token: the owner's secret, from :func:`new_token`; a store writes for a claim only if the
            token is the record's. Attempts at the same request that follow each other within the
            record's lifetime have tokens that begin alike: see :attr:`origin`.
        record_id: the store's own number of the record; 0 where it has none, or no record yet: a
            store with transactions need not write one before the response.
        asked_at: ``time.monotonic()`` before the claim was made.
        interrupted: whether the attempt before it was interrupted, and not ended.
    """

    operation: Operation
    attempt: int
    token: str
    record_id: int = 0
    asked_at: float = field(default_factory=time.monotonic, compare=False, repr=False)
    interrupted: bool = False

    @property
    def key(self) -> str:
        """The operation's key."""
        return self.operation.key

    @property
    def scope(self) -> str:
        """The operation's scope."""
        return self.operation.scope

    @property
    def origin(self) -> str:
        """The name of this record among all that ever had the key. It is random, and the same for
        all of its attempts.
        """
        return self.token[:ORIGIN_LENGTH]


NAMESPACE: Final = uuid.UUID("9f4c2c1e-7c8e-5d0b-9b57-3f1d3a2f8f6a")
"""The namespace of derived keys."""


def derived_key(*, scope: str, key: str, fingerprint: str, name: str) -> str:
    """A key for another service, the same on every attempt at an operation, and for no other.

    It is a UUID (RFC 9562, version 5).

    Args:
        scope: the operation's scope.
        key: the operation's key.
        fingerprint: the operation's fingerprint.
        name: what the key is for, such as ``"charge"``.
    """
    parts = (scope, key, fingerprint, name)
    return str(uuid.uuid5(NAMESPACE, "".join(f"{len(part)}:{part}" for part in parts)))


@dataclass(frozen=True, slots=True)
class Payload:
    """The response of a completed operation, in the adapter's terms.

    Attributes:
        status: the response's status code.
        headers: its headers as ``(name, value)`` pairs, in order.
        body: its exact bytes; ``None``: a tombstone, that is, executed, but the response was not
            kept.
    """

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes | None

    @property
    def result(self) -> Any:
        """The result of the function, task or handler of events that this is the response of.

        A response that was written by hand may be no JSON: an empty body is ``None``, and any other
        is a text.
        """
        body = self.body or b"null"
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            return body.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The record that a store holds under ``(key, scope)``.

    Attributes:
        status: see :class:`Status`; an expired record is reported as it was stored.
        attempt: which attempt wrote it.
        fingerprint: of its request; empty while it is not yet visible.
        payload: the stored response; ``None`` unless completed.
        expired: whether its time to live is over, by the store's clock.
        interrupted: whether it is in progress and its owner's lease is over, by the store's clock:
            the owner is dead, or late.
        held: whether it waits for an operator to settle it: it was interrupted, or its last attempt
            has failed. It is ``interrupted`` in both cases.
        lease_left: seconds until its owner's lease ends, by the store's clock, 0 if it is over;
            ``None``: it has none, or it is unknown. It takes no part in comparisons.
        ttl_left: seconds until its time to live ends, by the store's clock, and below 0 after that;
            ``None``: it does not end, or it is unknown. It takes no part in comparisons.
        counted: whether this look at it has been counted as a replay already.
        record_id: the store's own number of it; 0 where it has none.
        pinned: whether a failed attempt may have had effects elsewhere.
        token: of its last attempt, if the store shows it.
    """

    key: str
    scope: str
    status: Status
    attempt: int = 1
    fingerprint: str = ""
    payload: Payload | None = None
    expired: bool = False
    interrupted: bool = False
    held: bool = False
    lease_left: float | None = field(default=None, compare=False)
    ttl_left: float | None = field(default=None, compare=False)
    counted: bool = False
    record_id: int = 0
    pinned: bool = field(default=False, compare=False)
    token: str = field(default="", compare=False, repr=False)

    # Which request gets the key next, for stores that decide it by their records.

    def is_free(self, operation: Operation, has_steps: Callable[[], bool]) -> bool:
        """Whether an operation may have the key.

        Args:
            operation: wants it.
            has_steps: whether it has recovery points; called only if that makes a difference.
        """
        if self.begins_anew(operation):
            return True
        same = self.fingerprint == operation.fingerprint
        if self.status is Status.FAILED:
            return same or not (self.pinned or has_steps())
        return self.interrupted and same and not self.held

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A recovery point: a named step of an operation, and its result.

    Attributes:
        name: the step's name.
        attempt: which attempt ran it.
        result: what it returned, as JSON.
    """

    name: str
    attempt: int
    result: str


# What stores have in common: how a response and a record are written and read.


StoredPayload = tuple[int, str, bytes | None]
"""The stored form of a response.

Its status code; its headers, a JSON list of pairs; its bytes, or ``None`` if they are not kept.
"""


def encode(payload: Payload) -> StoredPayload:
    """The stored form of a response, in every store. To encrypt or compress responses, change this
    and :func:`decode`, which must still read what was written before.
    """
    headers = json.dumps(payload.headers) if payload.headers else "[]"
    return payload.status, headers, payload.body


def decode(status: int, headers: str | bytes, body: bytes | memoryview | None) -> Payload:
    """The response that was stored.

    Raises:
        ValueError: its headers are not what :func:`encode` writes.
    """
    pairs = [] if headers == "[]" else json.loads(headers)
    if not (isinstance(pairs, list) and all(map(_is_header, pairs))):
        raise ValueError("its headers are not pairs of strings")
    kept = None if body is None else bytes(body)
    return Payload(status, tuple((name, value) for name, value in pairs), kept)


def _is_header(pair: Any) -> bool:
    match pair:
        case [str(), str()]:
            return True
        case _:
            return False


def read_record(key: str, scope: str, row: Sequence[Any]) -> Record:
    """The record of a key, as a store has written it.

    Args:
        key: the key.
        scope: its scope.
        row: the store's number of it, its status, attempt, fingerprint, token, ``hold`` and
            ``pinned``; the stored form of its response; the seconds until its lease ends, and until
            its time to live does, by the store's clock.
    """
    number, status, attempt, fingerprint, token, hold, pinned, *stored, lease_left, ttl_left = row
    in_progress = status == Status.IN_PROGRESS
    interrupted = in_progress and lease_left is not None and lease_left <= 0
    return Record(
        key=key,
        scope=scope,
        status=Status(status),
        attempt=attempt,
        fingerprint=fingerprint,
        payload=decode(*stored) if status == Status.COMPLETED else None,
        # It is not looked at before the attempt has ended.
        expired=not in_progress and ttl_left is not None and ttl_left <= 0,
        interrupted=interrupted,
        held=interrupted and bool(hold),
        pinned=bool(pinned),
        lease_left=None if lease_left is None else max(0.0, float(lease_left)),
        ttl_left=None if ttl_left is None else float(ttl_left),
        record_id=number,
        token=token,
    )
