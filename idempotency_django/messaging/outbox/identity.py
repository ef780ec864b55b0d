"""What names a message of the outbox: nothing that is published twice gets two names."""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

from ...concurrency.rollbacks import on_rollback
from ...engine.context import ExecutionContext
from ...engine.steps import current_step


@dataclass(slots=True)
class _Published:
    """What one attempt has published so far."""

    ordinals: Counter[tuple[str, ...]] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)


_published: Final[WeakKeyDictionary[ExecutionContext, _Published]] = WeakKeyDictionary()


def next_id(execution: ExecutionContext, using: str, *what: str) -> str:
    """The id of the next message of this kind that the attempt publishes.

    Where another attempt may resume this one, it is a UUID (RFC 9562, version 5) of what names the
    record, the step that runs, the kind of message, and how many of that kind the attempt has
    published in this step. An attempt that is resumed gives its messages the same ids. What a
    rollback undoes is not counted. Elsewhere, a rollback takes the message back where it takes the
    claim back, so each message is a new one.

    Args:
        execution: the attempt.
        using: the database that the message is written to.
        what: the topic, the type and the group.
    """
    published = _published.setdefault(execution, _Published())
    kind = (current_step(), *what)
    ordinal = published.ordinals[kind]
    published.ordinals[kind] += 1
    on_rollback(using, partial(published.ordinals.subtract, [kind]))
    return execution.derive_id("\0".join((*kind, str(ordinal)))) or uuid7()


def published_by(execution: ExecutionContext) -> set[str]:
    """The ids of what this attempt has published, whether it was rolled back or not."""
    return _published.setdefault(execution, _Published()).ids


def uuid7() -> str:
    """A UUID (RFC 9562, version 7): unique, and in the order of time for the index's sake."""
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = milliseconds << 80 | 0x7 << 76 | (random >> 68 & 0xFFF) << 64
    return str(uuid.UUID(int=value | 0b10 << 62 | random & (1 << 62) - 1))
