"""What a policy demands of its store, in the store's own terms: a store knows no policies."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, Protocol


class Demands(Protocol):
    """The fields of a resolved :class:`~idempotency_django.policy.Policy` that concern a store."""

    @property
    def mode(self) -> Literal["auto", "transactional", "leased"]:
        """The guarantee; ``"auto"``: the best one that the store can give."""

    @property
    def ttl(self) -> timedelta | None:
        """How long an answer is replayed; ``None``: for good."""

    @property
    def ttl_from(self) -> Literal["creation", "last_use"]:
        """What the time to live counts from."""

    @property
    def retention(self) -> timedelta:
        """How long a record is kept for the audit after that."""

    @property
    def lease(self) -> timedelta:
        """How long a claim in the leased mode lives unless it is renewed."""

    @property
    def on_interrupted(self) -> Literal["resume", "hold"]:
        """Whether what was interrupted waits for an operator."""

    @property
    def record_replays(self) -> bool:
        """Whether replays are counted."""

    @property
    def store_body(self) -> bool:
        """Whether the bodies of answers are kept."""

    @property
    def max_response_bytes(self) -> int:
        """The size of the largest body that is kept."""
