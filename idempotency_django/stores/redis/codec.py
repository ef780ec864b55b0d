"""How values are written in the arguments of the Redis scripts, and read from their replies."""

from __future__ import annotations

import json
from datetime import timedelta

from ...records import Payload, Record, Status


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
    _, status, attempt, fingerprint, code, headers, size, body, *flags = reply
    expired, interrupted, held, counted = (flag == b"1" for flag in flags)
    found = Status(status.decode())
    payload = None
    if found is Status.COMPLETED:
        payload = Payload(int(code), _headers(headers), body if size else None)
    return Record(
        key=key,
        scope=scope,
        status=found,
        attempt=int(attempt),
        fingerprint=fingerprint.decode(),
        payload=payload,
        expired=expired,
        interrupted=interrupted,
        held=held,
        counted=counted,
    )


def _headers(stored: bytes) -> tuple[tuple[str, str], ...]:
    headers = json.loads(stored)
    match headers:
        case list() if all(_is_header(header) for header in headers):
            return tuple((name, value) for name, value in headers)
        case _:
            raise ValueError("its headers are not pairs of strings")


def _is_header(header: object) -> bool:
    match header:
        case [str(), str()]:
            return True
        case _:
            return False
