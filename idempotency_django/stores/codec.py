"""How answers and recovery points are written into a store, and read from it: the one place."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..records import Payload, Step


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """An answer as a store keeps it.

    Attributes:
        status: the answer's status code.
        headers: its headers, as a JSON list of pairs.
        body: its bytes; ``None``: they are not kept.
    """

    status: int
    headers: str
    body: bytes | None


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A recovery point as a store keeps it: what it returned or failed with, as JSON."""

    result: str
    failure: str


def encode(payload: Payload) -> StoredPayload:
    """The answer to be stored."""
    headers = json.dumps(payload.headers) if payload.headers else "[]"
    return StoredPayload(payload.status, headers, payload.body)


def decode(status: int, headers: str | bytes, body: bytes | memoryview | None) -> Payload:
    """The stored answer.

    Raises:
        ValueError: its headers are not what :func:`encode` writes.
    """
    pairs = json.loads(headers)
    if not (isinstance(pairs, list) and all(map(_is_header, pairs))):
        raise ValueError("its headers are not pairs of strings")
    kept = None if body is None else bytes(body)
    return Payload(status, tuple((name, value) for name, value in pairs), kept)


def encode_step(step: Step) -> StoredStep:
    """The recovery point to be stored."""
    return StoredStep(step.result, step.failure)


def decode_step(position: int, name: str, attempt: int, result: str, failure: str) -> Step:
    """The stored recovery point."""
    return Step(position=position, name=name, attempt=attempt, result=result, failure=failure)


def _is_header(pair: Any) -> bool:
    match pair:
        case [str(), str()]:
            return True
        case _:
            return False
