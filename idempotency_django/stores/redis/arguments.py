"""The arguments of the Redis scripts, and their replies."""

from __future__ import annotations

from datetime import timedelta

from ...records import Record, Status
from ..codec import decode


def milliseconds(duration: timedelta | None) -> str:
    """A duration for a script: at least one; empty where there is none."""
    return "" if duration is None else str(max(1, round(duration / timedelta(milliseconds=1))))


def flag(value: bool) -> str:
    """A truth value for a script."""
    return "1" if value else "0"


def text(value: str) -> bytes:
    """Any text for a script, for people to read."""
    return value.encode("utf-8", "replace")


def read_record(key: str, scope: str, reply: list[bytes]) -> Record:
    """What a script described.

    Raises:
        ValueError: it is not what the store writes.
    """
    _, status, attempt, fingerprint, code, headers, size, body, *flags, left = reply
    expired, interrupted, held, counted = (flag == b"1" for flag in flags)
    state = Status(status.decode())
    completed = state is Status.COMPLETED
    return Record(
        key=key,
        scope=scope,
        status=state,
        attempt=int(attempt),
        fingerprint=fingerprint.decode(),
        payload=decode(int(code), headers, body if size else None) if completed else None,
        expired=expired,
        interrupted=interrupted,
        held=held,
        lease_left=int(left) / 1000 if left else None,
        counted=counted,
    )
